"""Executor "newton": all steps of a nonlinear loop solved at once, with a certificate and a fallback to the loop."""

from jrnn.loops.newton.api import options_of, scan_statistics, solve
from jrnn.loops.newton.options import Newton, ScanStatistics

__all__ = ["Newton", "ScanStatistics", "options_of", "scan_statistics", "solve"]
