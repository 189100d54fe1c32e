"""Executor "newton": all steps of a nonlinear loop solved at once, with a certificate and a fallback to the loop."""

from jrnn.loops.newton.options import Newton, ScanStatistics, options_of

__all__ = ["Newton", "ScanStatistics", "options_of"]
