"""What jrnn does with a JAX that has other names: each name that `jaxprs/jax_internals` reads, renamed in its file.

python tests/loops/renamed_in_jax.py CASES

CASES is a JSON list of `[old, new, is_untested]`: the text `old` of the files becomes `new`, and JAX may count as newer than
all tested versions. Each case runs in a fork of this process, which has loaded JAX and nothing of jrnn. It prints a line of
JSON: the largest relative difference of the gradients of `jrnn.scan` and `jax.lax.scan`, or the error; and the warnings.
"""

import importlib.abc
import importlib.util
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

FOLDER = Path(__file__).parents[2] / "jrnn" / "jaxprs" / "jax_internals"
SOURCES = {
    f"jrnn.jaxprs.jax_internals.{name}": FOLDER / f"{name}.py" for name in ("lowering", "tracing")
}


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports the files of `jax_internals` with other sources."""

    def __init__(self, old, new, is_untested):
        texts = {str(path): path.read_text(encoding="utf-8") for path in SOURCES.values()}
        assert any(old in text for text in texts.values()), f"{old!r} is not in {FOLDER.name}"
        tested = ("is_untested = ", "is_untested = True or ") if is_untested else ("", "")
        self._texts = {
            path: text.replace(old, new).replace(*tested) for path, text in texts.items()
        }

    def find_spec(self, name, path, target=None):
        if name not in SOURCES:
            return None
        return importlib.util.spec_from_file_location(name, SOURCES[name], loader=self)

    def get_filename(self, name):
        return str(SOURCES[name])

    def get_data(self, path):
        return self._texts[path].encode()

    def path_stats(self, path):
        raise OSError("its bytecode is of another source")


def difference():
    """Returns the largest relative difference between gradients of a loop by `jrnn.scan` and by `jax.lax.scan`."""
    import jrnn

    w, xs = (
        jnp.linspace(-0.5, 0.5, 64).reshape(8, 8),
        jnp.linspace(-1, 1, 24 * 8 * 8).reshape(24, 8, 8),
    )

    def loss(scan, w, xs):
        def step(h, x):
            h = jax.jit(jnp.tanh)(h @ w + x @ w)
            return h, (h, jnp.sin(h))

        return jnp.sum(scan(step, jnp.ones((8, 8)), xs)[1][0] ** 2)

    ours, theirs = (
        jax.jit(jax.grad(lambda *args, s=s: loss(s, *args), (0, 1)))(w, xs)
        for s in (jrnn.scan, jax.lax.scan)
    )
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in zip(ours, theirs))


def run(old, new, is_untested):
    heard = []
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: heard.append(str(message))
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("jrnn").addHandler(handler)
    sys.meta_path.insert(0, Renamed(old, new, is_untested))
    try:
        return [difference(), heard]
    except Exception:
        return [traceback.format_exc(), heard]


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        if os.fork() == 0:
            print(json.dumps(run(*case)), flush=True)
            os._exit(0)
        os.wait()
