"""One check: gradients in three ways, in float64, compared element by element, and the operator at fault."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jrnn.errors import GradientWarning
from jrnn.gradcheck.compare import DIFFERENCE_TOLERANCE, TOLERANCE, Effort, agreements
from jrnn.gradcheck.fault import fault_in_function, first_fault
from jrnn.gradcheck.inner import inner_errors
from jrnn.gradcheck.report import GradientReport
from jrnn.gradcheck.subject import Subject, subject_of_net
from jrnn.gradcheck.three_ways import weighted
from jrnn.ir import Net


def check_gradients(
    net: Net,
    blobs: Mapping[str, Any],
    loss: str | None = None,
    *,
    wrt: Iterable[str] | None = None,
    key: Any = None,
    tolerance: float = TOLERANCE,
    difference_tolerance: float = DIFFERENCE_TOLERANCE,
    max_elements: int = 200,
    directions: int = 0,
    second: bool = False,
) -> GradientReport:
    """Computes the gradient of a net in three ways, in float64, and compares them element by element.

    Args:
        net: the forward net, or a training net, whose backward pass is left aside.
        blobs: what the net reads; floating point blobs are converted to float64.
        loss: a blob of one element. None: every floating point output of the net, and the whole Jacobian where it has up
            to 4096 elements, else one gradient is drawn that arrives at the outputs.
        wrt: blobs to differentiate by; every floating point one given that the net reads, by default.
        key: a `jax.random.key` for random operators; each evaluation draws the same numbers.
        tolerance: for JAX's gradient against the net's, relative to the gradient's largest element where that is above 1.
        difference_tolerance: the same for JAX's gradient against central differences.
        max_elements: how many elements of a blob are checked by differences one by one, spread evenly.
        directions: along how many random directions the blobs with more elements are checked in addition.
        second: whether second derivatives are compared too, JAX's with differences of its gradient.

    Raises:
        GradientError: for a loss of more than one element, an unknown blob, or an operator without gradient.
        NetError, OpError: as `run_net` does.

    >>> from jrnn.ir import Net, Op
    >>> net = Net("n", (Op.of("Tanh", ["x"], ["y"]), Op.of("SumElements", ["y"], ["loss"])))
    >>> check_gradients(net, {"x": np.array([0.5, -1.0], np.float32)}, "loss").agrees
    True
    """
    effort = Effort(tolerance, difference_tolerance, max_elements, directions, second)
    with jax.enable_x64(True):
        return check(subject_of_net(net, blobs, loss, wrt=wrt, key=key), effort)


def check(s: Subject, effort: Effort, *, inner: bool = False) -> GradientReport:
    """The report on a subject, to be called with 64-bit types enabled; `inner` asks for the blobs within the net, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradientWarning)  # the fault says what stops a gradient
        return _check(s, effort, inner)


def _check(s: Subject, effort: Effort, inner: bool) -> GradientReport:
    blobs, notes = agreements(s, effort)
    single = sum(v[0].size for v in s.seeds.values()) == 1
    fault = None
    if not all(b.agrees for b in blobs):
        fault = first_fault(s, effort, blobs)
        if fault is None and not s.exact:
            notes.append("the net that the function converts to agrees with itself: the function is at fault")
            fault = fault_in_function(s, effort)
    return GradientReport(
        loss=float(np.asarray(jax.jit(weighted(s))(s.point))[0]) if single else None,
        blobs=tuple(blobs),
        tolerance=effort.tolerance,
        difference_tolerance=effort.difference_tolerance,
        name=s.net.name,
        outputs=tuple(s.seeds),
        inner=inner_errors(s) if inner else {},
        fault=fault,
        notes=tuple(notes),
    )
