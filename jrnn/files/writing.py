"""Writes files and folders that are the old or the new, never a mixture: on a full disk, after Ctrl-C, and killed.

What is written stands next to its target, in a name that begins with a dot and ends in .part, until it takes the target's
place in one step. A process that is killed leaves such a name behind. Its writer held a lock on it, so the next writer into
that folder sees that it is free, and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from jrnn.errors import ErrorType, JrnnError, UsageError, needs_extra
from jrnn.files.reading import PathName, kind_of

# AT_FDCWD and RENAME_EXCHANGE of Linux
_HERE = -100
_EXCHANGE = 2
_HALF = re.compile(r"\.[0-9a-f]{32}\.part")


def write_whole(target: Path, data: bytes, error: ErrorType, parents: bool = False) -> None:
    """Writes a file in one step, with `parents` also its folders; a device, or a pipe with a reader, is written to.

    Raises:
        JrnnError: of type `error`, if the file cannot be written.
    """
    with reporting(target, error):
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        if kind_of(target) in ("a pipe", "a device"):
            with open(target, "wb", opener=_at_once) as opened:
                os.set_blocking(opened.fileno(), True)
                opened.write(data)
            return
    with new_file(target, error) as half, open(half, "wb") as f:
        f.write(data)


def append_to(target: Path, error: ErrorType) -> TextIO:
    """Opens a file to write lines at its end, which is closed by the caller.

    Raises:
        JrnnError: of type `error`, if it cannot be opened, or is no file.
    """
    with reporting(target, error):
        opened = open(target, "a", encoding="utf-8", newline="", opener=_at_once)  # noqa: SIM115
    if (kind := kind_of(target)) != "a file":
        opened.close()
        raise error(f"{target!s:.300}: is {kind}, not a file")
    return opened


def _at_once(name: str, flags: int) -> int:
    """Opens without waiting for the other end of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


@contextlib.contextmanager
def new_file(target: PathName, error: ErrorType) -> Iterator[Path]:
    """Gives the path of an empty file to write, which takes the place of `target` when the block ends without an error.

    A link stays, and the file that it names is replaced.

    Raises:
        JrnnError: of type `error`, if the file cannot be written.
    """
    with reporting(target, error):
        whole = Path(target).resolve()
        with _half(whole.parent, is_folder=False) as half:
            yield half
            os.replace(half, whole)


@contextlib.contextmanager
def new_folder(
    target: PathName, error: ErrorType, replaces: tuple[str, ...] = ()
) -> Iterator[Path]:
    """Gives the path of a new folder to write into, which takes the place of `target` when the block ends without an error.

    Files of the old folder stay, as links to the same bytes, unless the new one has them or a pattern of `replaces` fits
    their name. Where no folder can take the place of another, because `target` is the working directory, a mount, or has
    folders of its own, the files are replaced one by one, each in one step.

    Raises:
        JrnnError: of type `error`, if something cannot be written.
    """
    with reporting(target, error):
        whole = Path(target).resolve()
        whole.parent.mkdir(parents=True, exist_ok=True)
        if whole.is_dir():
            _remove_left(whole)
        inside = whole.is_dir() and _must_stay(whole)
        with _half(whole if inside else whole.parent, is_folder=True) as half:
            yield half
            old = [p for p in whole.iterdir() if p != half] if whole.is_dir() else []
            spare = [path for path in old if any(map(path.match, replaces))]
            if not inside:
                for path in old:
                    if path not in spare and not (half / path.name).exists():
                        _link(path, half / path.name)
                inside = not _put(half, whole)
            if inside:
                _put_files(half, whole, spare)


@contextlib.contextmanager
def _half(folder: Path, is_folder: bool) -> Iterator[Path]:
    """Makes an empty file or folder in a folder and locks it. At the end it removes whatever has its name."""
    _remove_left(folder)
    half = folder / f".{uuid.uuid4().hex}.part"
    locked = None
    try:
        while not os.path.lexists(half):  # another writer may remove it before it is locked
            half.mkdir() if is_folder else half.touch(exist_ok=False)
            locked = _lock(half)
        yield half
    finally:
        _remove(half)
        if locked is not None:
            os.close(locked)


def _lock(half: Path, more: int = 0) -> int | None:
    """Opens a half-written file or folder and locks it until it is closed; returns None if it is locked or gone."""
    opened = None
    try:
        opened = os.open(half, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        fcntl.flock(opened, fcntl.LOCK_EX | more)
        if os.path.samestat(os.fstat(opened), os.lstat(half)):
            return opened
    except OSError:
        pass
    if opened is not None:
        os.close(opened)
    return None


def _remove_left(folder: Path) -> None:
    """Removes what killed processes left half written in a folder."""
    with contextlib.suppress(OSError):
        for name in filter(_HALF.fullmatch, os.listdir(folder)):
            if (locked := _lock(folder / name, fcntl.LOCK_NB)) is not None:
                _remove(folder / name)
                os.close(locked)


def _remove(half: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        if half.is_dir() and not half.is_symlink():
            shutil.rmtree(half, ignore_errors=True)
        else:
            half.unlink()


@contextlib.contextmanager
def reporting(target: PathName, error: ErrorType) -> Iterator[None]:
    """Raises `error` instead of the system's errors."""
    try:
        yield
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        if isinstance(e, JrnnError):
            raise
        raise error(
            f"{target!s:.300}: cannot be written: {getattr(e, 'strerror', None) or e}"
        ) from None


def _must_stay(folder: Path) -> bool:
    here = Path.cwd()
    return (
        folder in (here, *here.parents)
        or folder.is_mount()
        or any(p.is_dir() for p in folder.iterdir())
    )


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(old, new, follow_symlinks=False)


def _put(new: Path, target: Path) -> bool:
    """Replaces a folder by another in one step; returns False if the system cannot."""
    try:
        os.rename(new, target)
        return True
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # of Linux
    return (
        rename is not None
        and rename(_HERE, os.fsencode(new), _HERE, os.fsencode(target), _EXCHANGE) == 0
    )


def _put_files(new: Path, target: Path, spare: list[Path]) -> None:
    for path in new.iterdir():
        os.replace(path, target / path.name)
    for path in spare:
        if path.is_file():
            path.unlink()


SUFFIXES = (".png", ".svg", ".pdf")


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Gives the `with` block a matplotlib figure of a size in inches, and saves it to `path` afterwards.

    Raises:
        UsageError: matplotlib is not installed, the name of the file has an unknown suffix, or it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(needs_extra(f"{path}: a picture", "plot")) from None
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: the name of a picture must end in one of {', '.join(SUFFIXES)}")
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:].lower())
    write_whole(path, drawn.getvalue(), UsageError)
