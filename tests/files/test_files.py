"""The room of files: what is opened, what JSON is read, and that what is written is the old or the new."""

import ast
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

import jrnn
from jrnn.errors import DataError
from jrnn.files import (
    AtLeast,
    append_to,
    checked,
    new_file,
    new_folder,
    open_file,
    parse_json,
    read_file,
    read_json,
    read_text,
    record,
    write_whole,
)
from jrnn.files.tensors import open_tensors, write_tensors

ROOT = Path(jrnn.__file__).parent

# Functions that open a file by its name, as calls with these ends, and where else they may stand.
OPENERS = {
    "open": {},
    "io.open": {},
    "os.open": {"train/run_dir.py": "the lock", "cli/output.py": "/dev/null"},
    "read_text": {},
    "read_bytes": {},
    "write_text": {},
    "write_bytes": {},
    "np.load": {},
    "np.save": {"cli/nets.py": "into memory"},
    "np.savez": {},
    "np.memmap": {},
    "np.fromfile": {},
    "np.loadtxt": {},
    "np.genfromtxt": {},
    "json.load": {},
    "json.loads": {
        "bench/peers.py": "of our own process",
        "loops/ir/tag.py": "a mark of our own",
        "train/run_dir.py": "of our own text",
        "train/toml_codec.py": "of our own text",
        "cli/tools.py": "of the command line",
    },
    "tomllib.load": {},
    "onnx.load": {},
    "onnx.save": {"onnx/read.py": "a path of new_file"},
    "torch.load": {"interop/torch_weights.py": "a file that open_file has opened"},
    "lmdb.open": {"nets/proto/database.py": "a file that open_file has opened"},
    "archive.open": {"tensors.py": "of a zip file", "convert/export.py": "in memory"},
    "zipfile.ZipFile": {
        "tensors.py": "a file that open_file has opened",
        "convert/export.py": "in memory",
    },
    "safe_open": {},
    "load_file": {},
    "save_file": {},
    "Tokenizer.from_file": {},
    "os.replace": {},
    "os.rename": {},
}
METHODS = {
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
}  # of any path; the others are exact names


def test_nothing_else_opens_files():
    lasts = {opener.rpartition(".")[2] for opener in OPENERS}
    calls = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if name.startswith("files/") or not any(last in text for last in lasts):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                not isinstance(node, ast.Call)
                or getattr(node.func, "attr", getattr(node.func, "id", "")) not in lasts
            ):
                continue
            called = ast.unparse(node.func)
            owner, _, last = called.rpartition(".")
            opener = last if last in METHODS and owner else called
            is_path = last == "open" and owner and called not in OPENERS and _is_path(node)
            if (
                is_path or (opener in OPENERS and called not in METHODS)
            ) and name not in OPENERS.get(opener, {}):
                calls.append(f"{name}:{node.lineno}: {called}")
    assert not calls, "files are opened by jrnn.files only"


def _is_path(node: ast.Call) -> bool:
    """Whether the call is `path.open("r")`, by its mode."""
    modes = [
        a.value
        for a in (*node.args, *(k.value for k in node.keywords))
        if isinstance(a, ast.Constant)
    ]
    return any(isinstance(m, str) and set(m) <= set("rwxab+t") for m in modes)


@pytest.mark.parametrize("read", [open_file, read_file, read_text, read_json])
def test_what_is_no_file_is_not_read(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 1 << 40)  # takes no room on disk
    for name, rule in (
        ("pipe", "is a pipe, not a file"),
        ("", "is a folder, not a file"),
        ("/dev/zero", "is a device, not a file"),
        ("none", "no such file"),
        ("a\0b", "cannot be read: .*null"),
        ("\ud800", "cannot be read"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("large", "has 1,099,511,627,776 bytes; at most 67,108,864 are read"),
    ):
        with pytest.raises(DataError, match=rule) as e:
            read(tmp_path / name, DataError)
        assert len(str(e.value)) < 500


def test_text_that_is_not_utf_8_is_named(tmp_path):
    for data, rule in (
        (b"caf\xe9", "byte 3 is 0xe9"),
        ("a".encode("utf-16"), "is UTF-16; convert it"),
    ):
        (tmp_path / "t").write_bytes(data)
        with pytest.raises(DataError, match=rule):
            read_text(tmp_path / "t", DataError)
    (tmp_path / "t").write_bytes("\ufeffa\r\nb".encode())
    assert read_text(tmp_path / "t", DataError) == "a\nb"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "Expecting value"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[Infinity]", "Infinity is not a finite number"),
        ("[NaN]", "NaN is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ("9" * 5000, "integer string conversion"),
        (r'"\ud800"', "half of a surrogate pair"),
        (r'{"\udc00": 1}', "half of a surrogate pair"),
        (b"\xff", "'utf-8' codec can't decode"),
    ],
)
def test_what_is_no_json_is_named(text, rule):
    with pytest.raises(DataError, match=f"x.json: .*{rule}"):
        parse_json(text, "x.json", DataError)


def test_json_is_read():
    assert parse_json(r'{"a": "\ud83d\ude00", "b": [1, 2.5, null]}', "", DataError) == {
        "a": "😀",
        "b": [1, 2.5, None],
    }
    assert parse_json("[" * 100 + "]" * 100, "", DataError)
    assert parse_json("[Infinity, 1e999]", "", DataError, finite=False) == [math.inf, math.inf]


@dataclass
class Inner:
    size: Annotated[int, AtLeast(1, 10)]


@dataclass
class Outer:
    name: str
    inner: list[Inner]
    share: float = 0.5


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, 3, 3.0),
        (int | None, None, None),
        (tuple[int, ...], [1, 2], (1, 2)),
        (Annotated[float, AtLeast(0, math.inf)], math.inf, math.inf),
        (Annotated[int, AtLeast(0, 2**48)], 2**40, 2**40),
        (int | Literal["auto"], "auto", "auto"),
        (Any, {"a": [1]}, {"a": [1]}),
        (list[Inner], [{"size": 3, "color": 1}], [Inner(3)]),
    ],
)
def test_values_of_a_kind(kind, value, expected):
    assert checked(kind, value, "x", DataError) == expected


@pytest.mark.parametrize(
    ("kind", "value", "rule"),
    [
        (int, True, "x must be an integer, is True"),
        (int, 1.0, "x must be an integer, is 1.0"),
        (bool, "false", "x must be true or false, is 'false'"),
        (int, 2**40, "x must have 32 bits"),
        (float, 10**400, "x must have 32 bits"),
        (float, math.inf, "x must be a finite number, is inf"),
        (Annotated[float, AtLeast(0, math.inf)], math.nan, "x must be a finite number, is nan"),
        (Annotated[float, AtLeast(0, math.inf)], 10**400, "x must be at most inf, is 1000"),
        (Annotated[int, AtLeast(1, 10)], 11, "x must be at most 10, is 11"),
        (Annotated[int, AtLeast(1)], 0, "x must be at least 1, is 0"),
        (int | Literal["auto"], "car", "x must be an integer or 'auto', is 'car'"),
        (list[str], ["a", 1], r"x\[1\] must be a string, is 1"),
        (list[str], "ab", "x must be a list, is 'ab'"),
        (tuple[int, int], [1], "x must have 2 elements, has 1"),
        (Literal[1], True, "x must be 1, is True"),
        (Literal["a", "b"], [], r"x must be 'a' or 'b', is \[\]"),
        (Inner, [], r"x: must be an object, is \[\]"),
        (
            Outer,
            {"name": "a", "inner": [{"size": 11}]},
            r"x: inner\[0\]: size must be at most 10, is 11",
        ),
        (Outer, {"inner": []}, "x: lacks 'name'"),
    ],
)
def test_values_of_other_kinds_are_named(kind, value, rule):
    with pytest.raises(DataError, match=rule):
        checked(kind, value, "x", DataError)


def test_a_record_has_its_defaults():
    assert record(Outer, {"name": "a", "inner": []}, "", DataError) == Outer("a", [], 0.5)


def test_a_failure_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "f"
    write_whole(path, b"old", DataError)
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("no")):
        with pytest.raises((DataError, KeyboardInterrupt)), new_file(path, DataError) as half:
            half.write_bytes(b"ne")
            raise error
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    (tmp_path / "link").symlink_to("f")
    write_whole(tmp_path / "link", b"new", DataError)
    assert path.read_bytes() == b"new" and (tmp_path / "link").is_symlink()


def test_a_pipe_that_nobody_reads_is_no_place_to_write(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="cannot be written: No such device"):
        write_whole(tmp_path / "pipe", b"data", DataError)
    with pytest.raises(DataError, match="cannot be written: No such device"):
        append_to(tmp_path / "pipe", DataError)
    with pytest.raises(DataError, match="is a device, not a file"):
        append_to(Path("/dev/null"), DataError)


def put(folder, replaces=("model-*",), **files):
    with new_folder(folder, DataError, replaces) as new:
        for name, text in files.items():
            (new / name).write_text(text)


def contents(folder):
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


def test_a_folder_takes_the_place_of_another(tmp_path):
    out = tmp_path / "a" / "out"
    put(out, config="1", **{"model-1": "1", "model-2": "1"})
    (out / "notes").write_text("mine")
    inode = out.stat().st_ino
    put(out, config="2", **{"model-1": "2"})
    assert contents(out) == {"config": "2", "model-1": "2", "notes": "mine"}
    if sys.platform == "linux":
        assert out.stat().st_ino != inode  # in one step
    with pytest.raises(DataError, match="No space left"), new_folder(out, DataError) as new:
        (new / "config").write_text("3")
        raise OSError(28, "No space left on device")
    assert contents(out)["config"] == "2" and os.listdir(out.parent) == ["out"]


def test_a_folder_that_must_stay_gets_its_files_one_by_one(tmp_path, monkeypatch):
    out = tmp_path / "out"
    put(out, config="1", **{"model-2": "1"})
    (out / "inner").mkdir()
    inode = out.stat().st_ino
    put(out, config="2", **{"model-1": "2"})
    assert (
        contents(out) == {"config": "2", "model-1": "2"}
        and out.stat().st_ino == inode
        and (out / "inner").is_dir()
    )
    (out / "inner").rmdir()
    monkeypatch.chdir(out)
    put(Path("."), config="3")
    assert contents(out) == {"config": "3"} and out.stat().st_ino == inode
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        put(tmp_path / "file", config="1")


KILLED = """
import os, sys
from pathlib import Path
from jrnn.errors import DataError
from jrnn.files import new_folder
events = iter(range(10**6))
EVENTS = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "shutil.rmtree", "ctypes.dlopen")
def hook(event, args):
    if event in EVENTS and next(events) == at:
        os.kill(os.getpid(), 9)
at = 0
while True:
    out = Path(sys.argv[1]) / str(at)
    out.mkdir()
    for name in ("config", "model-2", "notes"):
        (out / name).write_text("1")
    if not (pid := os.fork()):
        sys.addaudithook(hook)
        with new_folder(out, DataError, ("model-*",)) as new:
            (new / "config").write_text("2")
            (new / "model-1").write_text("2")
        os._exit(0)
    if not os.waitpid(pid, 0)[1]:
        break
    at += 1
"""


def test_a_folder_is_the_old_or_the_new_wherever_its_writer_is_killed(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    old, new = (
        {"config": "1", "model-2": "1", "notes": "1"},
        {"config": "2", "model-1": "2", "notes": "1"},
    )
    states = [contents(tmp_path / str(at)) for at in range(len(os.listdir(tmp_path)))]
    assert states[0] == old and states[-1] == new and len(states) > 9
    assert all(
        one in (old, new) for one in states
    )  # and a writer has removed what the killed ones left


def test_a_writer_leaves_what_another_is_writing(tmp_path):
    (tmp_path / f".{'0' * 32}.part").mkdir()
    (tmp_path / f".{'1' * 32}.part").symlink_to(tmp_path.parent)
    (tmp_path / ".mine.part").write_text("")
    with new_file(tmp_path / "a", DataError) as a, new_folder(tmp_path / "b", DataError) as b:
        write_whole(tmp_path / "c", b"", DataError)
        assert {*os.listdir(tmp_path)} == {a.name, b.name, "c", ".mine.part", f".{'1' * 32}.part"}
    assert sorted(os.listdir(tmp_path)) == [f".{'1' * 32}.part", ".mine.part", "a", "b", "c"]


def test_a_tensor_twice_is_named(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": np.ones(2, np.float32), "b": np.float32(3)}, DataError)
    with open_tensors(path, DataError) as tensors:
        assert tensors.get_tensor("b").shape == () and sorted(tensors.keys()) == ["a", "b"]
    path.write_bytes(path.read_bytes().replace(b'"b":', b'"a":'))
    with (
        pytest.raises(DataError, match="the header: is not JSON: an object has the key 'a' twice"),
        open_tensors(path, DataError),
    ):
        pass
