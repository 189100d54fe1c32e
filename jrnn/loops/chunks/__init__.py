"""Loops over matrix states in chunks: a step for one token is trained in the chunkwise parallel form.

`normal.py` opens control flow. `terms.py`, `views.py`, `known.py` and `forms.py` read the affine form of a step off its
equations. `recognize.py` decides which carries have one, and in which order they are computed. `labeled.py`, `decay.py`,
`solve.py`, `chunk.py`, `program.py` and `guarded.py` are the program of one chunk. `runner.py` runs a loop, and
`estimate.py` estimates what it costs.
"""

from jrnn.loops.chunks.estimate import compared
from jrnn.loops.chunks.guarded import all_finite
from jrnn.loops.chunks.normal import held, opened
from jrnn.loops.chunks.recognize import affine, why
from jrnn.loops.chunks.runner import Chunked, check, chunk_length, chunked, pays, stored_states
from jrnn.loops.chunks.terms import NotAffine

__all__ = [
    "Chunked",
    "NotAffine",
    "affine",
    "all_finite",
    "check",
    "chunk_length",
    "chunked",
    "compared",
    "held",
    "opened",
    "pays",
    "stored_states",
    "why",
]
