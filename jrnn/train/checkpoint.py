"""Checkpoints by orbax: written under another name and renamed when complete, so a checkpoint is whole or absent.

A seal, the checksums of a checkpoint's files, is written next to them when it is complete: a file that is damaged later is
detected before anything is read from it. One that lacks its seal (the process was killed just then) is read all the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrnn.errors import CheckpointError
from jrnn.train.toml_codec import parse_json

SEAL = "sha256.json"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax's own warnings off the terminal: what is wrong is checked here, and said in the run's words."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Checkpoints:
    """The checkpoints of a run, by step."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(f"{self.folder}: cannot be written: {e.strerror}") from None
        options = ocp.CheckpointManagerOptions(
            create=False,
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
            multiprocessing_options=_alone(),
        )
        with _quiet():
            self._manager = ocp.CheckpointManager(
                self.folder, item_handlers=ocp.StandardCheckpointHandler(), options=options
            )

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    @_quiet()
    def save(self, step: int, state: Any) -> None:
        """Saves a pytree of arrays as of `step`, unless that step is there already.

        Raises:
            CheckpointError: where it cannot be written; the ones before are intact.
        """
        if step in self._manager.all_steps():
            return
        try:
            self._manager.save(step, args=ocp.args.StandardSave(_as_dict(state)))
            _seal(self.folder / str(step))
        except (OSError, ValueError, RuntimeError) as e:
            raise CheckpointError(f"{self.folder / str(step)}: cannot be written: {_first_line(e)}") from e

    @_quiet()
    def restore(self, like: Any, step: int | None = None) -> tuple[Any, list[str]]:
        """The newest checkpoint that loads, or that of `step`, and warnings about newer ones that are damaged.

        Args:
            like: a pytree of arrays, or of shapes and dtypes, that the checkpoint must match.

        Raises:
            CheckpointError: where there is none, none is undamaged, or it is of another model.
        """
        steps = self.steps() if step is None else [step]
        if not steps:
            raise CheckpointError(f"{self.folder}: holds no complete checkpoint")
        damaged: list[str] = []
        for number in reversed(steps):
            where = self.folder / str(number)
            if (changed := broken_seal(where)) is not None:
                damaged.append(f"{where}: is damaged ({changed})")
                continue
            try:
                self._check_match(number, like)
                abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_dict(like))
                found = self._manager.restore(number, args=ocp.args.StandardRestore(abstract))
            except CheckpointError:
                raise
            except Exception as e:  # whatever orbax, tensorstore or a parser meets in damaged files
                damaged.append(f"{where}: is damaged ({_first_line(e)})")
                continue
            leaves = [found[name] for name in _as_dict(like)]
            return jax.tree.unflatten(jax.tree.structure(like), leaves), damaged
        raise CheckpointError("; ".join(damaged) + "; no checkpoint is left to continue from")

    def _check_match(self, number: int, like: Any) -> None:
        saved = _shapes(self._manager.item_metadata(number))
        wanted = _shapes(_as_dict(like))
        where = self.folder / str(number)
        for name in [*wanted, *saved]:
            if saved.get(name) != wanted.get(name):
                there, here = (_describe(x.get(name)) for x in (saved, wanted))
                raise CheckpointError(f"{where}: is of another model: {name} is {there} there, and {here} here")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends orbax's threads."""
        self._manager.close()


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(SEAL))
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _seal(folder: Path) -> None:
    aside = folder / (SEAL + ".tmp")
    aside.write_text(json.dumps(_digests(folder), indent=1))
    aside.replace(folder / SEAL)


def _alone() -> ocp.options.MultiprocessingOptions:
    """Of several processes only this one writes and reads, and waits for no other."""
    me = jax.process_index()
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(me, {me}, barrier_sync_key_prefix=f"process_{me}")


def broken_seal(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None where nothing is, or there is no seal."""
    try:
        sealed = parse_json((folder / SEAL).read_text())
        found = _digests(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        return f"{SEAL}: {_first_line(e)}"
    if not isinstance(sealed, dict):
        return f"{SEAL} is not what was written"
    return next((f"{name} is not what was written" for name in sealed if found.get(name) != sealed[name]), None)


def _as_dict(state: Any) -> dict[str, Any]:
    """A pytree as a flat dict from paths to arrays, whatever containers it is made of."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(state)}


def _shapes(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(x.shape), str(np.dtype(x.dtype))) for name, x in dict(tree).items()}


def _describe(found: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if found is None else f"{found[1]}{list(found[0])}"


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{lines[0][:200]}" if lines else type(e).__name__
