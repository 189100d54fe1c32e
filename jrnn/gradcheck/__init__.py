"""Proofs of gradients: JAX's, the generated net's, and central differences, in float64, side by side.

The first two are exact and must agree to rounding; differences are only as good as their step, and catch what both of the
others might have in common: a wrong forward.
"""

from .check import check, check_gradients
from .compare import Effort
from .report import BlobAgreement, Fault, GradientReport
from .subject import Subject, subject_of_net

__all__ = [
    "BlobAgreement",
    "Effort",
    "Fault",
    "GradientReport",
    "Subject",
    "check",
    "check_gradients",
    "subject_of_net",
]
