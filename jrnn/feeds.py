"""Values given on a command line: `BLOB=VALUE`."""

import json
import re
from collections.abc import Iterable

import numpy as np

from jrnn.errors import UsageError


def parse_feeds(feeds: Iterable[str], seed: int) -> dict[str, np.ndarray]:
    """The arrays that feeds of the forms BLOB=FILE.npy, BLOB=[1, 2.5] and BLOB=normal[2,3] name.

    Args:
        feeds: as they were given.
        seed: of the random numbers.

    Raises:
        UsageError: for a feed of another form, or a file that cannot be read.

    >>> parse_feeds(["x=[[1, 2]]", "w=normal[3]"], seed=0)["w"].shape
    (3,)
    """
    rng = np.random.default_rng(seed)
    blobs = {}
    for feed in feeds:
        name, equals, text = feed.partition("=")
        if not name or not equals:
            raise UsageError(f"--feed {feed}: must be written BLOB=VALUE, as in --feed x=x.npy")
        blobs[name] = _value(feed, text, rng)
    return blobs


def _value(feed: str, text: str, rng: np.random.Generator) -> np.ndarray:
    if drawn := re.fullmatch(r"normal(\[[\d, ]*\])", text):
        return np.asarray(rng.standard_normal(json.loads(drawn[1])), np.float32)
    if text.endswith(".npy"):
        try:
            array: np.ndarray = np.load(text, allow_pickle=False)
            return array
        except FileNotFoundError:
            raise UsageError(f"--feed {feed}: no such file") from None
        except (OSError, ValueError, EOFError) as e:
            raise UsageError(f"--feed {feed}: is not a .npy file of numbers: {e}") from None
    try:
        value = np.asarray(json.loads(text))
    except (json.JSONDecodeError, ValueError):
        value = np.asarray(None)
    if value.dtype.kind not in "iufb":
        raise UsageError(f"--feed {feed}: must be FILE.npy, a JSON number or list of numbers, or normal[2,3]")
    return value.astype({"i": np.int32, "u": np.int32, "f": np.float32, "b": np.bool_}[value.dtype.kind])
