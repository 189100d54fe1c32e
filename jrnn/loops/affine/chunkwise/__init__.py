"""Loops over matrix states in chunks: a step for one token is trained in the chunkwise parallel form.

In: a `Loop` and the forms of its matrix states. Out: a node that runs it chunk by chunk. Read `chunked.py` first.

- `control_flow.py` expands inner loops and conditions, so that `affine/` can read the form of a step off its equations.
- `chunked.py` orders the computation of the carries, and has the node that runs the loop. `estimate.py` has its cost.
- `chunk.py` has the formula of a chunk, in arrays with labels (`labeled.py`): what steps read and write (`step_values.py`),
  products of decays (`decay.py`, `shared_decay.py`, `vector_decay.py`), and a triangular system (`row_equations.py`,
  `solve.py`).
- `chunk_body.py` runs a chunk, by products or step by step (`guarded.py`), and `batched.py` runs all chunks at once.
"""
