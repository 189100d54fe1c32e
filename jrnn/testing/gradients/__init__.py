"""Checks of gradients: JAX's, the generated net's, and central differences, compared in float64.

In: a net, a function or a file, as a `Subject`. Out: a `GradientReport`. Read `check.py` first.

The first two are exact and must agree to rounding. Differences are less precise, but detect an error that the first two
share, such as a wrong forward function.
"""

from jrnn.testing.gradients.check import check, check_gradients
from jrnn.testing.gradients.compare import INEXACT, TOLERANCE, Effort
from jrnn.testing.gradients.named_subjects import (
    over_time,
    subject_of_file,
    subject_of_function,
    subject_of_target,
)
from jrnn.testing.gradients.report import BlobAgreement, Fault, GradientReport, page, table_of
from jrnn.testing.gradients.subject import Subject, subject_of_net
