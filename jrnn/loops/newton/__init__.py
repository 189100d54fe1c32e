"""Executor "newton": all steps of a nonlinear loop solved at once, with a certificate and a fallback to the loop.

In: a step as a function of flat lists. Out: all states, and how far they are from the loop's. Read `api.py` first.
"""

from jrnn.loops.newton.options import Newton, ScanStatistics, options_of

__all__ = ["Newton", "ScanStatistics", "options_of"]
