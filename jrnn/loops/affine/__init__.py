"""The reader of carries: which are overwritten, diagonal, matrix-valued or opaque, and in which order they can be computed.

In: a `Loop`. Out: groups of carries, each with its form, or the reason why it has none. Read `reader.py` first.

`reader.py` says what an affine step is, and reads its coefficients; `carries.py` groups carries and solves groups in order.
`matrix.py` reads the form of matrix-valued carries (`terms.py`) off a step (`equations.py`, `contractions.py`).
`blocks.py` reads which elements of the old carry the new one reads, whatever the step is, and lays out Jacobians.
`rounds.py` solves linear recurrences. `associative.py`, `chunkwise/`, `segments/`, `newton/` and `online.py` use them.
"""
