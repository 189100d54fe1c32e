"""Proofs of gradients: JAX's, the generated net's, and central differences, in float64, side by side.

The first two are exact and must agree to rounding; differences are only as good as their step, and catch what both of the
others might have in common: a wrong forward.
"""

from .check import check, check_gradients
from .compare import INEXACT, TOLERANCE, Effort
from .functions import over_time, subject_of_function
from .page import page
from .report import BlobAgreement, Fault, GradientReport
from .sources import subject_of_file, subject_of_target
from .subject import Subject, subject_of_net
from .table import table_of

__all__ = [
    "INEXACT",
    "TOLERANCE",
    "BlobAgreement",
    "Effort",
    "Fault",
    "GradientReport",
    "Subject",
    "check",
    "check_gradients",
    "over_time",
    "page",
    "subject_of_file",
    "subject_of_function",
    "subject_of_net",
    "subject_of_target",
    "table_of",
]
