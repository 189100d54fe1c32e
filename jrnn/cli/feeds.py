"""Values on the command line: `--feed NAME=VALUE`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import numpy as np

from jrnn.errors import OpError, UsageError
from jrnn.files.arrays import load_npy
from jrnn.nets.memory import check_size

_SHOWN = 200  # characters of a feed in an error


def parse_feeds(feeds: Iterable[str], seed: int) -> dict[str, np.ndarray]:
    """The arrays that feeds of the forms BLOB=FILE.npy, BLOB=[1, 2.5] and BLOB=normal[2,3] name; `seed` is for normal.

    >>> parse_feeds(["x=[[1, 2]]", "w=normal[3]"], seed=0)["w"].shape
    (3,)
    """
    rng = np.random.default_rng(seed)
    blobs = {}
    for feed in feeds:
        name, equals, text = feed.partition("=")
        if not name or not equals:
            raise UsageError(f"--feed {feed}: must be written BLOB=VALUE, as in --feed x=x.npy")
        blobs[name] = _feed_value(feed, name, text, rng)
    return blobs


def _feed_value(feed: str, name: str, text: str, rng: np.random.Generator) -> np.ndarray:
    feed = feed if len(feed) <= _SHOWN else f"{feed[:_SHOWN]}..."
    if text.endswith(".npy"):
        try:
            return load_npy(text, UsageError)
        except UsageError as e:
            raise UsageError(f"--feed {name}={e}") from None
    rule = f"--feed {feed}: must be FILE.npy, a JSON number or list of numbers, or normal[2,3]"
    dtypes = {"i": np.int32, "u": np.int32, "f": np.float32, "b": np.bool_}
    drawn = re.fullmatch(r"normal(\[[\d, ]*\])", text)
    try:
        value = json.loads(drawn[1] if drawn else text)
        if drawn:
            shape = check_size(value, np.float64)
            return np.asarray(rng.standard_normal(shape), np.float32)
        wide = np.asarray(value)
        with np.errstate(over="ignore"):
            given = wide.astype(dtypes[wide.dtype.kind])
    except OpError as e:
        raise e.at(f"--feed {feed}") from None
    except (ValueError, KeyError, OverflowError, RecursionError):
        raise UsageError(rule) from None
    lost = (given != wide) if given.dtype == np.int32 else np.isinf(given) & np.isfinite(wide)
    if lost.any():
        raise UsageError(f"--feed {feed}: {wide[lost][0]} does not fit {given.dtype}; give a .npy file of a wider type")
    return given
