"""Small linear algebra written as arithmetic, so that XLA:CPU compiles a loop as one kernel.

In: the equations of a step. Out: equations of the same values without calls. Read `rewrite.py` first.

XLA:CPU makes one kernel of a loop whose step has only elementwise operations, reductions, slices, branches and inner loops.
A product of small matrices, a factorization, a sort or a scatter is a call, and keeps the whole loop out of that.

`rewrite` applies the rules to a step and to what is inside of it. `products`, `factors`, `orders` and `draws` hold the
rules, and `operands` the arrays in them.
What fits, and what the loop costs then, is in `strategies/try_arithmetic.py`.
"""
