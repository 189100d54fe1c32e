"""Loops over matrix states in chunks: a step for one token is trained in the chunkwise parallel form.

In: a `Loop` and the forms of its matrix states. Out: a node that runs it chunk by chunk. Read `chunked.py` first.

`control_flow.py` expands inner loops and conditions. `affine/` reads the form of a step off its equations. `chunked.py`
orders the computation of the carries, and has the node that runs the loop. `estimate.py` estimates what it costs.
`labeled.py`, `decay.py`, `solve.py`, `chunk.py`, `program.py` and `guarded.py` are the program of one chunk.
"""
