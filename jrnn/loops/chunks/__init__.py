"""Loops over matrix states in chunks: a step for one token is trained in the chunkwise parallel form.

`forms.py` reads the affine form of a step off its equations. `recognize.py` decides which carries have one, and in which
order they are computed. `labeled.py`, `decay.py`, `solve.py` and `program.py` are the program of one chunk. `runner.py` runs
a loop.
"""

from jrnn.loops.chunks.forms import NotAffine
from jrnn.loops.chunks.recognize import why
from jrnn.loops.chunks.runner import Chunked, chunked, pays, stores_states

__all__ = ["Chunked", "NotAffine", "chunked", "pays", "stores_states", "why"]
