"""The cost model: what a processor is, and what equations and loops cost.

In: equations of a loop, and a machine. Out: an `Estimate` of seconds and bytes (`times.py`). Read `estimates.py` first.
"""
