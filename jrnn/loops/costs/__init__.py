"""The cost model: what a processor is, and what equations and loops cost.

In: equations of a loop, and a machine. Out: an `Estimate` of seconds and bytes (`times.py`). Read `estimates.py` first.

Rooms that run loops in other ways count what they run, and a file of this room says what that costs: `kernel_calls.py`
for calls of the kernel for CPUs, `tiny_loops.py` for those of tiny loops, and `chunk_costs.py` for matrix states in chunks.
"""
