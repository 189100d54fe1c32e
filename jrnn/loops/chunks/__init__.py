"""Loops over matrix states in chunks: a step for one token is trained in the chunkwise parallel form.

`forms.py` reads the affine form of a step off its equations. `recognize.py` decides which carries have one, and in which order the
carries are computed. `program.py` runs a chunk, with `decay.py` and `solve.py`. `runner.py` runs a loop.
"""
