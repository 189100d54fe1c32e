"""Strategies: the ways to run a loop, one file each.

In: the `Context` of a loop that is planned. Out: candidates, nodes with their estimates. Read `try_split.py` first.

A strategy is a function `try_x(context)` that returns candidates, nothing if there is nothing to say, or raises
`Unsupported` with the reason if it cannot run the loop. `compile.py` lists them, and chooses.
"""
