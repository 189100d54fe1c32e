"""Writes the program of an LSTM to a file, for native_threads.cpp: native_program.py FILE"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from cases import draw, lstm_step

from jrnn.loops.ir import traced_loops
from jrnn.loops.kernels.native.program import program_of


def encoded() -> np.ndarray:
    """The number of integers, and the program."""
    shapes = dict(wx=(5, 76), wh=(19, 76), b=(1, 76), x=(40, 23, 5), h0=(23, 19), c0=(23, 19))
    p = {name: jnp.asarray(v, jnp.float32) for name, v in draw(0, **shapes).items()}
    (loop,) = traced_loops(lambda p: jax.lax.scan(lstm_step(p), (p["h0"], p["c0"]), p["x"]), p)
    program = program_of(loop).encoded
    return np.concatenate([[program.size], program])


if __name__ == "__main__":
    encoded().astype(np.int64).tofile(sys.argv[1])
