"""Models of the Hugging Face hub: the files that jrnn reads, downloaded once, by the package huggingface_hub."""

from __future__ import annotations

import logging
import re
from os import PathLike
from pathlib import Path
from typing import Any

from jrnn.errors import FormatError, needs_extra

TEXTS = ("*.json", "*.jinja")  # the configuration, the tokenizer, indices of weights
WEIGHTS = "*.safetensors"
TORCH = "pytorch_model*.bin"  # only if a model has no safetensors

_NAME = r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?"


def is_of_hub(source: str | PathLike[str]) -> bool:
    """Whether `source` can only be a name of the hub: not even the folder `owner` exists.

    >>> is_of_hub("state-spaces/mamba-130m-hf"), is_of_hub("/tmp/model")
    (True, False)
    """
    return bool(re.fullmatch(_NAME, str(source))) and not Path(source).parent.exists()


def folder_of(source: str | PathLike[str], revision: str | None = None) -> Path:
    """Returns the folder of a model: `source` itself, or the folder to which a model of the hub was downloaded.

    Files that were downloaded before are not downloaded again; huggingface_hub keeps them in its cache (`HF_HOME`). Without
    a network, or with `HF_HUB_OFFLINE=1`, the cache is all that is read. The logger `jrnn.models` says how many bytes will
    be downloaded before they are.

    Args:
        source: a folder, or `owner/name` of the hub, also with a branch, tag or commit: `owner/name@revision`. Where there
            is a folder of that name, the folder is read.
        revision: the branch, tag or commit. None: the one in `source`, else the hub's default.

    Raises:
        FormatError: if the hub has no such model, or it is not reachable and the cache does not hold the model; if
            huggingface_hub is not installed.

    >>> folder_of("models/mine").name  # no name of the hub: a folder
    Traceback (most recent call last):
    jrnn.errors.FormatError: models/mine: ...
    """
    folder = Path(source)
    name = re.fullmatch(_NAME, str(source))
    if name is None or folder.exists():
        if revision is not None:
            raise FormatError(f"{source}: a folder has no revision, {revision!r} was given")
        return folder
    return _downloaded(name[1], revision or name[2])


def _downloaded(name: str, revision: str | None) -> Path:
    """Downloads what is not in the cache, and returns the folder in the cache."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
        from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        hint = f"there is no folder {name}; the model {name} of the Hugging Face hub"
        raise FormatError(needs_extra(hint, "hub")) from None
    where = name if revision is None else f"{name}@{revision}"
    try:
        files = _files(hub, name, revision)
    except DryRunError as e:
        wanted = [*TEXTS, WEIGHTS]
        try:
            folder = hub.snapshot_download(
                name, revision=revision, allow_patterns=wanted, local_files_only=True
            )
            return Path(folder)
        except LocalEntryNotFoundError:
            raise _unreachable(where, e.__cause__ or e) from None
    except HfHubHTTPError as e:
        raise _unreachable(where, e) from None
    new = [file for file in files if file.will_download]
    if new:
        megabytes = sum(file.file_size or 0 for file in new) / 1e6
        logging.getLogger("jrnn.models").warning(
            "%s: downloading %d files, %.1f MB, to %s", where, len(new), megabytes, constants.HF_HUB_CACHE
        )  # fmt: skip
    names = [file.filename for file in files]
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=names))
    except LocalEntryNotFoundError as e:
        raise _unreachable(where, e) from None


def _unreachable(where: str, reason: BaseException) -> FormatError:
    lines = " ".join(str(reason).split())
    return FormatError(f"{where}: there is no such folder, and the hub cannot be read: {lines}")


def _files(hub: Any, name: str, revision: str | None) -> list[Any]:
    """Returns what huggingface_hub would download, with its size: no file of torch if there are safetensors."""
    for weights in (WEIGHTS, TORCH):
        wanted = [*TEXTS, weights]
        files = hub.snapshot_download(name, revision=revision, allow_patterns=wanted, dry_run=True)
        own = [file for file in files if "/" not in file.filename]
        if any(not file.filename.endswith((".json", ".jinja")) for file in own):
            return own
    raise FormatError(f"{name}: the model of the hub has neither {WEIGHTS} nor {TORCH}")
