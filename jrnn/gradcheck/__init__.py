"""Proofs of gradients: JAX's, the generated net's, and central differences, in float64, side by side.

The first two are exact and must agree to rounding; differences are only as good as their step, and catch what both of the
others might have in common: a wrong forward.
"""

from .check import check, check_gradients
from .compare import INEXACT, TOLERANCE, Effort
from .functions import arguments_of, over_time, required, subject_of_function
from .report import BlobAgreement, Fault, GradientReport
from .subject import Subject, subject_of_net

__all__ = [
    "INEXACT",
    "TOLERANCE",
    "BlobAgreement",
    "Effort",
    "Fault",
    "GradientReport",
    "Subject",
    "arguments_of",
    "check",
    "check_gradients",
    "over_time",
    "required",
    "subject_of_function",
    "subject_of_net",
]
