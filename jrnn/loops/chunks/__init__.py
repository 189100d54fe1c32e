"""Loops over matrix states in chunks: a step for one token is trained in the chunkwise parallel form.

`normal.py` opens control flow. `affine/` reads the form of a step off its equations. `labeled.py`, `decay.py`, `solve.py`,
`chunk.py`, `program.py` and `guarded.py` are the program of one chunk. `chunked.py` decides in which order the carries are
computed and runs a loop, and `estimate.py` estimates what it costs.
"""

from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.chunks.chunked import Chunked, check, chunk_length, chunked, pays, stored_states
from jrnn.loops.chunks.estimate import compared
from jrnn.loops.chunks.guarded import all_finite
from jrnn.loops.chunks.normal import held, opened

__all__ = [
    "Chunked",
    "NotAffine",
    "all_finite",
    "check",
    "chunk_length",
    "chunked",
    "compared",
    "held",
    "opened",
    "pays",
    "stored_states",
]
