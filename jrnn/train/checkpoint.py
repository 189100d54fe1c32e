"""Checkpoints by orbax: written under another name and renamed when complete, so a checkpoint is whole or absent.

A complete checkpoint gets a seal: a file with the checksums of its files, so that later damage is detected before anything
is read. A checkpoint without a seal, because the process was killed just before or the seal is lost, may be damaged: it is
read only if no sealed checkpoint loads.
"""

from __future__ import annotations

import bisect
import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrnn.errors import CheckpointError
from jrnn.files import LARGEST, digest_of, kind_of, open_file, read_json, write_whole
from jrnn.train.optimizers import name_of

SEAL = "sha256.json"
REMOVED = ".removed"  # ends the name that a checkpoint gets before its files are removed


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax's own warnings and tracebacks off the terminal; this module reports the same faults."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Damaged(CheckpointError):
    """The files of a checkpoint are not what was written."""


class Checkpoints:
    """The checkpoints of a run, by step."""

    def __init__(self, folder: Path, keep: int | None = 2, read_only: bool = False):
        """Opens a folder; `keep`: how many checkpoints stay when others are saved, None for all."""
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"{self.folder}: cannot be written: {e.strerror}") from None
        if not read_only:  # a killed process may have left some
            for path in self.folder.glob(f".*{REMOVED}"):
                _remove(path)
        for step in steps_in(self.folder):
            # Orbax reads these files to list the checkpoints.
            _check_files(self.folder / str(step), LARGEST, "_*")
        with _quiet():
            options = ocp.CheckpointManagerOptions(
                create=False,
                max_to_keep=None if read_only else keep,
                cleanup_tmp_directories=not read_only,
                enable_async_checkpointing=False,
                multiprocessing_options=_alone(),
                read_only=read_only,
            )
            self._manager = ocp.CheckpointManager(
                self.folder, item_handlers=ocp.StandardCheckpointHandler(), options=options
            )

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def is_whole(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is there with its seal, and nothing of it is damaged."""
        folder = self.folder / str(step)
        return step in self.steps() and is_sealed(folder) and broken_seal(folder) is None

    @_quiet()
    def save(self, step: int, state: Any) -> None:
        """Saves a pytree of arrays for `step`, unless that step is there already.

        Raises:
            CheckpointError: if it cannot be written, or a later step is there; older checkpoints stay intact.
        """
        folder = self.folder / str(step)
        steps = self.steps()
        if step in steps and is_sealed(folder):
            return
        if steps and steps[-1] > step:
            raise CheckpointError(
                f"{folder}: cannot be written: the folder holds a checkpoint of a later step, {steps[-1]}"
            )
        try:
            if step in steps:
                self._manager.delete(step)
            if not self._manager.save(step, args=ocp.args.StandardSave(_as_dict(state))):
                raise CheckpointError(f"{folder}: cannot be written: orbax saves nothing here")
            write_whole(
                folder / SEAL, json.dumps(_digests(folder), indent=1).encode(), CheckpointError
            )
        except CheckpointError:
            raise
        except (OSError, ValueError, RuntimeError) as e:
            full = os.strerror(errno.ENOSPC)  # which tensorstore says at the end of a long line
            why = full if full in str(e) else _first_line(e)
            raise CheckpointError(f"{folder}: cannot be written: {why}") from e

    @_quiet()
    def remove(self, steps: Iterable[int]) -> None:
        """Removes the checkpoints of these steps; each is there or gone when the process is killed meanwhile.

        Raises:
            CheckpointError: if one cannot be removed.
        """
        removed = False
        for step in sorted(steps, reverse=True):
            folder = self.folder / str(step)
            gone = self.folder / f".{step}{REMOVED}"
            try:
                folder.rename(gone)
            except OSError as e:
                raise CheckpointError(f"{folder}: cannot be removed: {e.strerror}") from None
            _remove(gone)
            removed = True
        if removed:
            self._manager.reload()

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which are of a branch that the run does not go on with."""
        self.remove(later for later in steps_in(self.folder) if later > step)

    def remove_but(self, ends: Iterable[int]) -> None:
        """Keeps the newest checkpoint, and of each step in `ends` the newest one up to it; removes all others."""
        steps = self.steps()
        needed = set(steps[-1:])
        for end in ends:
            up_to_end = steps[: bisect.bisect_right(steps, end)]
            needed.update(up_to_end[-1:])
        self.remove(set(steps) - needed)

    @_quiet()
    def load(self, step: int, like: Any) -> Any:
        """Returns the checkpoint of one step; see `restore`.

        Raises:
            CheckpointError: if it belongs to another model; a `_Damaged` if its files are not what was written.
        """
        where = self.folder / str(step)
        flat = _as_dict(like)
        most = LARGEST + 4 * sum(
            np.dtype(x.dtype).itemsize * math.prod(x.shape) for x in flat.values()
        )
        try:
            _check_files(where, most)
        except CheckpointError as e:
            raise _Damaged(str(e)) from None
        if (changed := broken_seal(where)) is not None:
            raise _Damaged(f"{where}: is damaged ({changed})")
        try:
            _check_match(where, _shapes(self._manager.item_metadata(step)), _shapes(flat))
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, flat)
            leaves = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except CheckpointError:
            raise
        except Exception as e:  # whatever orbax, tensorstore or a parser raises for damaged files
            raise _Damaged(f"{where}: is damaged ({_first_line(e)})") from None
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in flat])

    def restore(self, like: Any) -> tuple[Any, list[str]]:
        """Returns the newest sealed checkpoint that loads, or else the newest one; and warnings about those not used.

        Args:
            like: a pytree of arrays, or of shapes and dtypes, that the checkpoint must match.

        Raises:
            CheckpointError: if there is no checkpoint, all are damaged, or the newest belongs to another model.
        """
        if not self.steps():
            raise CheckpointError(f"{self.folder}: holds no complete checkpoint")
        damaged: list[str] = []
        numbers = sorted(
            self.steps(), key=lambda n: (is_sealed(self.folder / str(n)), n), reverse=True
        )
        for number in numbers:
            where = self.folder / str(number)
            try:
                restored = self.load(number, like)
            except _Damaged as e:
                damaged.append(str(e))
                continue
            used = f"step {number} is used"
            warnings = [f"{text}; {used}" for text in damaged]
            if not is_sealed(where):
                warnings.append(
                    f"{where}: is not sealed, so damage cannot be detected; {used}, as no sealed one is left"
                )
                return restored, warnings
            for later in numbers:
                folder = self.folder / str(later)
                if later > number and not is_sealed(folder):
                    warnings.append(f"{folder}: is not sealed; {used}")
            return restored, warnings
        raise CheckpointError("; ".join(damaged) + "; no checkpoint is left to continue from")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self._manager.close()  # ends orbax's threads


def _remove(path: Path) -> None:
    """Removes a file or a folder as far as possible; nothing reads the rest."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _digests(folder: Path) -> dict[str, str]:
    """Returns the checksums of a checkpoint's files, without the seal."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(SEAL):
            digests[path.relative_to(folder).as_posix()] = digest_of(path, CheckpointError)
    return digests


def _check_files(folder: Path, most: int, names: str = "*") -> None:
    """Raises CheckpointError for files of more than `most` bytes and for special files, before orbax opens them."""
    for path in folder.rglob(names):
        if kind_of(path) != "a folder":
            open_file(path, CheckpointError, most).close()


def steps_in(folder: Path) -> list[int]:
    """Returns the steps whose checkpoints a folder holds."""
    names = os.listdir(folder) if folder.is_dir() else ()
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{1,18}", name))


def _alone() -> ocp.options.MultiprocessingOptions:
    """Lets only this one of several processes write and read, without waiting for the others."""
    me = jax.process_index()
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(me, {me}, barrier_sync_key_prefix=f"process_{me}")


def is_sealed(folder: Path) -> bool:
    return kind_of(folder / SEAL) != ""


def broken_seal(folder: Path) -> str | None:
    """Describes what is wrong with the files of a checkpoint; None if nothing is, or there is no seal."""
    if not is_sealed(folder):
        return None
    try:
        sealed = read_json(folder / SEAL, CheckpointError)
        digests = _digests(folder)
    except CheckpointError as e:
        return _first_line(e)
    for name, digest in sealed.items():
        if digests.get(name) != digest:
            return f"{name} is not what was written"
    return None


def _as_dict(state: Any) -> dict[str, Any]:
    """Returns a pytree of any containers as a flat dict from paths to arrays."""
    return {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _shapes(tree: Any) -> dict[str, str]:
    return {name: f"{np.dtype(x.dtype)}{list(x.shape)}" for name, x in dict(tree).items()}


def _check_match(where: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in [*wanted, *saved]:
        there = saved.get(name, "absent")
        here = wanted.get(name, "absent")
        if there != here:
            raise CheckpointError(
                f"{where}: is of another model: {name} is {there} there, and {here} here"
            )


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{lines[0][:200]}" if lines else type(e).__name__
