"""Tiny loops on CPUs, whose step takes a few nanoseconds: several steps in one trip.

In: a `Loop`. Out: what runs it, as a loop over trips of which XLA:CPU makes one kernel. Read `steps.py` first.

`steps.py` runs the steps of a trip one after the other. `affine.py` reads steps that are affine in the carry with
coefficients that no input changes, and `lookahead.py` runs them so that a trip does not wait for the trip before it.
Where XLA runs a loop kernel by kernel, `products.py` runs them as products of small matrices. `trips.py` has the loops over
trips, which read and write stacks in place.
"""
