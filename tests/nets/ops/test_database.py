"""Databases: what Caffe2 wrote is read as it reads it, what is saved is what it saves, and files are out of reach."""

import contextlib
import pathlib
import sys
import types

import numpy as np
import pytest
from build_plans import execution_step, make_plan

import jrnn
from jrnn import Net
from jrnn.errors import FormatError, OpError
from jrnn.nets import Op
from jrnn.nets.plans import run_plan
from jrnn.nets.proto import blob_to_numpy, message_class, tensor_from_numpy
from jrnn.nets.proto.database import format_minidb, parse_minidb, read_database, tensors_of

FILE = np.load(pathlib.Path(__file__).parents[2] / "golden" / "database.npz")
OUTPUTS = ("data", "label", "word", "bytes")
OPEN = Net(
    "open", (Op.of("CreateDB", [], ["reader"], db="records", db_type="minidb"),), (), ("reader",)
)
READ = Net(
    "read", (Op.of("TensorProtosDBInput", ["reader"], OUTPUTS, batch_size=2),), ("reader",), OUTPUTS
)


def format_tensors(array):
    protos = message_class("TensorProtos")()
    protos.protos.add().MergeFromString(tensor_from_numpy(array).data)
    return protos.SerializeToString(deterministic=True)


@pytest.fixture
def folder(tmp_path):
    for name in ("records", "saved"):
        (tmp_path / name).write_bytes(FILE[name].tobytes())
    return tmp_path


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_batches_are_caffe2s(folder, rounds):
    """The fifth record and the first one again are the third batch."""
    got = run_plan(
        make_plan("p", OPEN, execution_step("loop", READ, num_iter=rounds)), files=folder
    )
    for name in OUTPUTS:
        want = FILE[f"in|{rounds - 1}|{name}"]
        np.testing.assert_array_equal(got[name].astype(want.dtype), want)
        assert want.dtype.kind == "S" or got[name].dtype == want.dtype


def test_what_is_saved_is_what_caffe2_saves_and_loads(folder):
    blobs = {n.removeprefix("save|"): FILE[n] for n in FILE.files if n.startswith("save|")}
    save = Op.of("Save", list(blobs), [], db="mine", db_type="minidb", strip_prefix="p/")
    jrnn.run_net(Net("save", (save,)), blobs, files=folder)
    mine, theirs = (parse_minidb((folder / n).read_bytes()) for n in ("mine", "saved"))
    assert [k for k, _ in mine] == [k for k, _ in theirs] == [b"w#%0", b"count#%0"]
    for (_, got), (_, want) in zip(mine, theirs):
        (name, array), (wanted, other) = blob_to_numpy(got), blob_to_numpy(want)
        assert name == wanted and array.dtype == other.dtype and array.tolist() == other.tolist()
    for args, names in (
        ({}, ("w", "count")),
        ({"add_prefix": "x/"}, ("x/w",)),
        ({"source_blob_names": ["w"]}, ("other",)),
    ):
        load = Op.of("Load", [], names, db="saved", db_type="minidb", **args)
        got = jrnn.run_net(Net("load", (load,)), {}, files=folder)
        np.testing.assert_array_equal(got[names[0]], FILE["loaded|w"])


def test_what_the_caller_gives_makes_its_producer_optional():
    unknown = Op.of("ImageInput", ["reader"], ["data"])
    double = Net("double", (unknown, Op.of("Add", ["data", "data"], ["y"])), ("reader",), ("y",))
    data = np.ones(2, np.float32)
    assert jrnn.run_net(double, {"data": data})["y"].tolist() == [2, 2]
    plan = make_plan(
        "p",
        execution_step(
            "loop", [READ, Net("sum", (Op.of("Add", ["data", "s"], ["s"]),))], num_iter=3
        ),
    )
    given = {"data": data, "label": data, "word": data, "bytes": data, "s": np.zeros(2, np.float32)}
    assert run_plan(plan, given)["s"].tolist() == [3, 3]


def test_print_says_what_a_blob_holds(capsys):
    blobs = {"x": np.arange(6, dtype=np.int32).reshape(2, 3)}
    jrnn.run_net(Net("n", (Op.of("Print", ["x"], [], limit=4),)), blobs)
    assert capsys.readouterr().out == "x int32[2, 3]: 0, 1, 2, 3\n"


@pytest.mark.parametrize(
    "op, message",
    [
        (
            Op.of("Load", [], ["w"], db="../saved", db_type="minidb"),
            "which is not within the folder",
        ),
        (
            Op.of("Load", [], ["w"], db="/etc/passwd", db_type="minidb"),
            "which is not within the folder",
        ),
        (Op.of("Save", ["x"], [], db="/tmp/x", db_type="minidb"), "which is not within the folder"),
        (Op.of("Save", ["x"], [], db="x", db_type="leveldb"), "blobs can be saved as minidb"),
        (Op.of("Load", [], ["w"], db="none", db_type="minidb"), "none: no such file"),
        (Op.of("Load", [], ["w"], db="saved", db_type="leveldb"), "it must be one of minidb, lmdb"),
        (
            Op.of("Load", [], ["v"], db="saved", db_type="minidb"),
            "has no blob 'v'; it has 'w', 'count'",
        ),
        (Op.of("Load", [], ["w"], db="records", db_type="minidb"), "has no blob 'w'"),
        (Op.of("Print", ["x"], [], to_file=1), "to_file asks for a file"),
    ],
)
def test_refusals(folder, op, message):
    inner = folder / "inner"
    inner.mkdir()
    with pytest.raises((OpError, FormatError), match=message):
        root = inner if ".." in str(op.arg("db")) else folder
        jrnn.run_net(Net("n", (op,)), {"x": np.ones(1, np.float32)}, files=root)


def test_a_batch_larger_than_any_machine(folder):
    huge = Net("read", (READ.ops[0].with_args({"batch_size": 10**9}),))
    with pytest.raises(OpError, match="an operator fills at most"):
        run_plan(make_plan("p", OPEN, huge), files=folder)


def test_files_are_out_of_reach_by_default():
    with pytest.raises(OpError, match="nets reach no files by themselves: give the folder"):
        jrnn.run_net(OPEN, {})


def test_a_file_is_read_when_it_is_needed(folder):
    missing = Net("open", (OPEN.ops[0].with_args({"db": "missing"}),))
    assert jrnn.run_net(missing, {}, files=folder)["reader"].next == 0
    with pytest.raises(FormatError, match="missing: no such file"):
        run_plan(make_plan("p", missing, READ), files=folder)


def test_records_that_do_not_go_together(folder):
    records = [(b"0", format_tensors(np.ones(2))), (b"1", format_tensors(np.ones(3)))]
    (folder / "records").write_bytes(format_minidb(records))
    one = Net("read", (READ.ops[0].with_args({"batch_size": 2}),))
    with pytest.raises(OpError, match="has 1 tensors; there are 4 outputs"):
        run_plan(make_plan("p", OPEN, one), files=folder)
    mixed = Net("read", (Op.of("TensorProtosDBInput", ["reader"], ["x"], batch_size=2),))
    with pytest.raises(OpError, match="differ in shapes or types"):
        run_plan(make_plan("p", OPEN, mixed), files=folder)


def test_an_lmdb_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(
        FormatError, match=r"an LMDB needs the extra 'lmdb': pip install 'jrnn\[lmdb\]'"
    ):
        read_database(tmp_path, "lmdb")


def test_records_of_an_lmdb(tmp_path, monkeypatch):
    """The package itself is an extra; what is asked of it is what it documents."""
    records = parse_minidb(FILE["records"].tobytes())
    asked = {}

    def open_(path, **options):
        asked.update(options, path=path)
        transaction = contextlib.nullcontext(types.SimpleNamespace(cursor=lambda: iter(records)))
        return contextlib.nullcontext(types.SimpleNamespace(begin=lambda: transaction))

    monkeypatch.setitem(sys.modules, "lmdb", types.SimpleNamespace(open=open_, Error=OSError))
    (tmp_path / "data.mdb").touch()
    pairs = read_database(tmp_path, "lmdb")
    assert pairs == records and [t.shape for t in tensors_of(pairs[0][1])] == [(2, 3), (), (), (4,)]
    assert asked == {"path": str(tmp_path), "readonly": True, "lock": False, "subdir": True}
