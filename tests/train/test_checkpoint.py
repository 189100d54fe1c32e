"""Checkpoints: whole or not there; damage is met, named, and stepped over; another model is refused."""

import os
import shutil
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jrnn.errors import CheckpointError
from jrnn.train.checkpoint import SEAL, Checkpoints, steps_in


class Pair(NamedTuple):
    params: dict
    rest: tuple


def state(value, shape=(3, 2)):
    # keys out of order, and containers of several kinds
    params = {
        "w": jnp.full(shape, float(value)),
        "lstm/b": jnp.arange(4.0) + value,
        "a.b": jnp.zeros(()),
    }
    return Pair(params, (jnp.int32(value), {"z": jnp.full(2, float(value))}))


def assert_same(actual, expected):
    assert isinstance(actual, Pair)
    for name, value in expected.params.items():
        np.testing.assert_array_equal(actual.params[name], value)
    assert int(actual.rest[0]) == int(expected.rest[0])
    np.testing.assert_array_equal(actual.rest[1]["z"], expected.rest[1]["z"])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2; tests copy it."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(2, state(2))
        checkpoints.save(2, state(7))  # is there already
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


def restore(folder, like):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(like)


def test_the_newest_is_restored(folder):
    restored, warnings = restore(folder, state(0))
    assert_same(restored, state(2))
    assert warnings == []
    shutil.rmtree(folder / "2")
    assert_same(restore(folder, state(0))[0], state(1))


def test_old_ones_are_dropped(folder):
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(3, state(3))
        checkpoints.save(4, state(4))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [3, 4]


def test_half_written_ones_are_not_seen(folder):
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    (folder / "3.orbax-checkpoint-tmp" / "commit_success.txt").unlink(missing_ok=True)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        assert_same(checkpoints.restore(state(0))[0], state(2))


@pytest.mark.sample("flip")
@pytest.mark.parametrize("damage", ["delete", "cut", "flip"])
def test_no_damage_gives_wrong_numbers(folder, tmp_path, damage):
    """Whatever file of the newest checkpoint is damaged: it loads as it was, or the one before does, with a warning."""
    files = sorted(p.relative_to(folder) for p in (folder / "2").rglob("*") if p.is_file())
    assert len(files) >= 5
    for number, file in enumerate(files):
        copy = shutil.copytree(folder, tmp_path / f"{damage}{number}")
        _damage(copy / file, damage)
        restored, warnings = restore(copy, state(0))
        assert_same(restored, state(1))
        lost = (
            damage == "delete" and file.name == SEAL
        )  # as where the process was killed just before
        what = "is not sealed; step 1 is used" if lost else "is damaged ("
        assert len(warnings) == 1 and warnings[0].startswith(f"{copy / '2'}: {what}")


def _damage(path, how):
    raw = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        middle = len(raw) // 2
        path.write_bytes(
            raw[:middle] + bytes(b ^ 0xFF for b in raw[middle : middle + 1]) + raw[middle + 1 :]
        )


def test_the_warnings_of_libraries_do_not_show(folder, caplog):
    (folder / "2" / "_CHECKPOINT_METADATA").unlink()
    (folder / "2" / SEAL).unlink()
    (folder / "1" / SEAL).unlink()
    restored, warnings = restore(folder, state(0))
    assert_same(restored, state(2))
    assert (
        len(warnings) == 1
        and "is not sealed, so damage cannot be detected; step 2 is used" in warnings[0]
    )
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 2]
    assert caplog.records == []


def test_a_checkpoint_without_a_seal_is_written_again(folder):
    """Its process was killed before it was sealed; the run went on from the one before, and comes to its step again."""
    (folder / "2" / SEAL).unlink()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(2, state(7))
    restored, warnings = restore(folder, state(0))
    assert_same(restored, state(7))
    assert warnings == []


def test_when_all_are_damaged(folder):
    for metadata in folder.rglob("manifest.ocdbt"):
        metadata.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"2: is damaged.*1: is damaged.*no checkpoint is left"
    ):
        restore(folder, state(0))


def test_damage_without_a_seal_is_an_error(folder, monkeypatch):
    """An error of orbax or tensorstore while they read is reported as damage."""
    for number in "12":
        (folder / number / SEAL).unlink()

    def fails(*args, **kwargs):
        raise ValueError("bad bytes\nand more")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fails)
    with pytest.raises(CheckpointError, match=r"2: is damaged \(bad bytes\); .*1: is damaged"):
        restore(folder, state(0))


def test_none_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        restore(tmp_path, state(0))


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            state(0, (3, 4)),
            r"2: is of another model: params\.w is float32\[3, 2\] there, and float32\[3, 4\] here",
        ),
        (
            Pair({**state(0).params, "new": jnp.zeros(1)}, state(0).rest),
            r"params\.new is absent there, and float32\[1\] here",
        ),
        (
            Pair({"w": state(0).params["w"]}, state(0).rest),
            r"params\.\S+ is float32\[\d*\] there, and absent here",
        ),
        (
            Pair(state(0).params, (jnp.float32(0), state(0).rest[1])),
            r"rest\.0 is int32\[\] there, and float32\[\] here",
        ),
    ],
)
def test_another_model_is_refused(folder, like, message):
    with pytest.raises(CheckpointError, match=message):
        restore(folder, like)


@pytest.mark.parametrize("room", [0, 100, 20_000])
def test_a_full_disk_leaves_the_checkpoints_before(folder, room, a_full_disk, caplog):
    big = Pair({"w": jnp.asarray(np.random.default_rng(0).normal(size=(100, 100)))}, ())
    with Checkpoints(folder) as checkpoints:
        with (
            a_full_disk(room),
            pytest.raises(CheckpointError, match=r"checkpoints/3: cannot be written: ."),
        ):
            checkpoints.save(3, big)
        assert checkpoints.steps() == [1, 2]
        assert_same(checkpoints.restore(state(0))[0], state(2))
    assert caplog.records == []  # orbax's own tracebacks
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, state(3))
        assert_same(checkpoints.restore(state(0))[0], state(3))
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]


@pytest.mark.parametrize("file", [SEAL, "_CHECKPOINT_METADATA", "default/manifest.ocdbt", "x"])
def test_a_pipe_in_a_checkpoint_is_named(folder, file):
    path = folder / "2" / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if file.startswith("_"):  # orbax reads it to list the checkpoints
        with pytest.raises(CheckpointError, match=f"{file}: is a pipe, not a file"):
            restore(folder, state(0))
    else:
        restored, warnings = restore(folder, state(0))
        assert_same(restored, state(1))
        assert f"{file}: is a pipe, not a file; step 1 is used" in warnings[0]


def test_odd_names_are_no_steps(folder):
    for name in ("\N{SUPERSCRIPT TWO}", "1" * 200, "-3", "x"):
        (folder / name).mkdir()
    assert steps_in(folder) == [1, 2]
    assert_same(restore(folder, state(0))[0], state(2))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoints: cannot be written"):
        Checkpoints(tmp_path / "checkpoints")
