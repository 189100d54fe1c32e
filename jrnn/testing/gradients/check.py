"""check: gradients in three ways, in float64, compared element by element, and the operator or equation at fault.

The fault is found by bisection. The operators from number k on are a net of their own, whose inputs are the blobs at that
border. Its gradients agree for every k behind the operator at fault and disagree for every k before it, because an error
stays on its way back. A fault in a function is usually a derivative rule of the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientWarning, describe_op
from jrnn.jaxprs import Eqn, Program, Var, evaluate, inlined, read, scan_counts, trace
from jrnn.jaxprs.flat import source_of
from jrnn.nets.graph.scope import Workspace, reads, workspace_of
from jrnn.nets.ir import Blobs, Names, Net, Op, Renames, Values
from jrnn.nets.lowering import run_net
from jrnn.nets.ops.recurrent_network import initial_state
from jrnn.nets.ops.recurrent_network_gradient import gradient_wiring
from jrnn.nets.ops.recurrent_wiring import Wiring, parse
from jrnn.nets.registry import lookup
from jrnn.testing.gradients import compare
from jrnn.testing.gradients.compare import Effort
from jrnn.testing.gradients.held import holding, rule_name, stopping_lines
from jrnn.testing.gradients.kinks import near_kinks
from jrnn.testing.gradients.report import BlobAgreement, Fault, GradientReport, WrittenFault, within
from jrnn.testing.gradients.subject import Subject, function_of, names_of_floats, subject_of_net
from jrnn.testing.gradients.written import fault_in_backward_step, written_gradients


def check_gradients(
    net: Net,
    blobs: Blobs,
    loss: str | None = None,
    *,
    wrt: Iterable[str] | None = None,
    key: Any = None,
    **effort: Any,
) -> GradientReport:
    """Computes the gradient of a net in three ways, in float64, and compares them element by element.

    The gradient operators that a training net holds itself are a fourth.

    Args:
        net: the forward net; or a training net, whose own gradient operators are compared too.
        blobs: what the net reads; floating-point blobs are converted to float64.
        loss: a blob of one element. If None, the blobs that a training net differentiates; of a net without gradient
            operators every floating-point output: the whole Jacobian if it has up to 4096 elements, else one random
            combination of the outputs.
        wrt: the blobs with respect to which gradients are computed; defaults to all floating-point blobs that the net reads.
        key: a `jax.random.key` for random operators; each evaluation draws the same numbers.
        effort: fields of `jrnn.testing.gradients.Effort`, such as `tolerance`, `max_elements` or `second`.

    Raises:
        GradientError: a loss of more than one element, an unknown blob, or an operator without gradient.
        NetError, OpError: as `run_net` does.

    >>> from jrnn.nets.ir import Net, Op
    >>> net = Net("n", (Op.of("Tanh", ["x"], ["y"]), Op.of("SumElements", ["y"], ["loss"])))
    >>> check_gradients(net, {"x": np.array([0.5, -1.0], np.float32)}, "loss").agrees
    True
    """
    with jax.enable_x64(True):
        return check(subject_of_net(net, blobs, loss, wrt=wrt, key=key), Effort(**effort))


def check(s: Subject, effort: Effort, *, inner: bool = False) -> GradientReport:
    """The report on a subject. To be called with 64-bit types enabled. `inner`: compare blobs within the net too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradientWarning)  # the fault says what stops a gradient
        written = None
        if s.written:
            effort.doing("running the gradient operators in the file")
            written = written_gradients(
                s.net, s.written, tuple(s.seeds), s.blobs, s.key, effort.tolerance
            )
        blobs, notes = compare.agreements(s, effort, written)
        stopped: list[str] = []
        lines = [] if s.exact else stopping_lines(s.function, s.point)
        if not s.exact and s.held is None and not _differences_agree(blobs, effort):
            held = holding(s.function, s.point)
            if held is not None:
                stopped = []
                for b in blobs:
                    if not effort.agrees(replace(b, net_error=None, second_error=None)):
                        stopped.append(b.name)
                s = replace(s, held=held)
                blobs, notes = compare.agreements(s, effort)
                at = ", ".join(lines) or "in a library"
                notes.append(
                    f"central differences treat values under stop_gradient as constants ({at})"
                )
                lines = _that_matter(s, lines, stopped, effort)
        fault: Fault | WrittenFault | None = None
        if not _differences_agree(blobs, effort):
            effort.doing("looking for kinks near the point")
            notes += near_kinks(s.function, s.point)
        of_three = [replace(b, file_error=None) for b in blobs]
        if not all(map(effort.agrees, of_three)):
            wrong_net = not _net_agrees(blobs, effort)
            if s.no_net is None and (wrong_net or s.held is None):
                fault = first_fault(s, effort, blobs)
            if fault is None and not s.exact:
                if s.no_net is None:
                    notes.append(
                        "the net has the right gradient: the fault is in your function's derivative rule"
                    )
                fault = fault_in_function(s, effort)
        if written is not None and written.fault is not None:
            if fault is None:
                fault = _with_step(s, written.fault, effort)
            elif any((b.file_error or 0) > effort.tolerance for b in blobs):
                notes.append(str(_with_step(s, written.fault, effort)))
        effort.doing(
            "computing the loss and the blobs within the net" if inner else "computing the loss"
        )
        single = sum(v[0].size for v in s.seeds.values()) == 1
        return GradientReport(
            loss=float(np.asarray(jax.jit(compare.weighted(s))(s.point))[0]) if single else None,
            blobs=tuple(blobs),
            tolerance=effort.tolerance,
            difference_tolerance=effort.difference_tolerance,
            name=s.net.name,
            outputs=tuple(s.seeds),
            inner=compare.inner_errors(s) if inner else {},
            fault=fault,
            notes=tuple(notes),
            stopped=tuple(stopped),
            stops=tuple(lines),
        )


def _with_step(s: Subject, fault: WrittenFault, effort: Effort) -> WrittenFault:
    """The fault of a gradient operator in the file, with what is wrong in the backward step net that it holds."""
    op = s.written[fault.position]
    if workspace_of(op) is not Workspace.STEP:
        return fault
    values = run_net(replace(s.net, external_outputs=()), s.blobs, key=s.key, wide=True)
    w = gradient_wiring(op)
    step = _step_of(w, replace(s, blobs={**s.blobs, **values}, written=()))
    inside = _fault_in_backward_step(w, step, effort)
    return replace(fault, inside=inside or "the operators of its backward step net agree")


def _that_matter(s: Subject, lines: list[str], names: list[str], effort: Effort) -> list[str]:
    """Those of the lines of `stop_gradient` that change the gradients of `names`; all if none does so alone."""
    if len(lines) < 2:
        return lines
    mine = compare.by_jax(s)

    def matters(line: str) -> bool:
        moving = replace(s, held=holding(s.function, s.point, moves=line))
        errors = compare.direction_errors(moving, mine, names, max(2, effort.directions))
        return not within(errors.values(), effort.difference_tolerance)

    return [line for line in lines if matters(line)] or lines


def _net_agrees(blobs: Sequence[BlobAgreement], effort: Effort) -> bool:
    return within([b.net_error for b in blobs], effort.tolerance)


def _differences_agree(blobs: Sequence[BlobAgreement], effort: Effort) -> bool:
    for b in blobs:
        if not (b.agrees or effort.agrees(replace(b, net_error=None))):
            return False
    return True


# The operator at fault -------------------------------------------------------------------------------------------------


def _bisect(count: int, is_wrong: Callable[[int], bool]) -> int:
    """The last k below `count` for which `is_wrong(k)`; it holds for 0, and for no k after the first that is not wrong."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_wrong(middle) else (low, middle)
    return low


def first_fault(s: Subject, effort: Effort, blobs: list[BlobAgreement]) -> Fault | None:
    """The operator nearest to the outputs at which gradients differ.

    None if the gradients of the net itself agree, which happens if the subject's function is not the net.
    """
    kind = "difference" if _net_agrees(blobs, effort) else "net"
    if not s.exact and not compare.disagree(_suffix(s, 0), effort, kind):
        return None

    def is_wrong(k: int) -> bool:
        effort.doing(f"looking for the operator at fault, at {k + 1} of {len(s.net.ops)}")
        return compare.disagree(_suffix(s, k), effort, kind)

    k = _bisect(len(s.net.ops), is_wrong)
    op = s.net.ops[k]
    at = _suffix(s, k)
    compared, _ = compare.agreements(at, replace(effort, second=False))
    wrong = [b for b in compared if not b.agrees] or compared
    b = max(
        [b for b in wrong if b.name in op.inputs] or wrong,
        key=lambda b: max(b.net_error or 0.0, b.difference_error),
    )
    inside = None
    written = None
    if workspace_of(op) is Workspace.STEP:
        inside, written = _fault_in_step(op, at, effort)
    where = describe_op(k, op.type, op.outputs, s.net.name)
    return Fault(where, op.type, b.name, b.worst, b.values, inside, _cut(op), written)


def _cut(op: Op) -> str | None:
    """Which gradients an operator stops by design."""
    definition = lookup(op.type)
    if definition.gradient == "stops":
        return f"every gradient ends at a {op.type}"
    return definition.cuts(op) if definition.cuts else None


def _suffix(s: Subject, k: int) -> Subject:
    """The operators from number k on, with one random combination of the gradients that arrive."""
    written = run_net(
        replace(s.net, ops=s.net.ops[:k], external_outputs=()), s.blobs, key=s.key, wide=True
    )
    known = {**s.blobs, **written}
    net = replace(s.net, ops=s.net.ops[k:], external_outputs=())
    given = {}
    for n in dict.fromkeys((*reads(net), *s.seeds)):
        if n in known:
            given[n] = known[n]
    net = replace(net, external_inputs=tuple(given))
    seeds = _mixed(s)
    return replace(
        s,
        net=net,
        blobs=given,
        wrt=tuple(names_of_floats(given)),
        seeds=seeds,
        function=function_of(net, seeds, given, s.key),
        written=(),
    )


def _mixed(s: Subject) -> dict[str, np.ndarray]:
    """One random combination of the gradients that arrive at each output, [1, ...]."""
    mix = np.random.default_rng(0).standard_normal(s.rows)
    return {y: np.tensordot(mix, v, 1)[None] for y, v in s.seeds.items()}


def _fault_in_step(
    op: Op, at: Subject, effort: Effort
) -> tuple[Fault | str | None, WrittenFault | None]:
    """The fault in the gradient of a recurrent network's step, and the operator of its backward step net that is wrong."""
    w = parse(op, op.inputs, op.outputs)
    step = _step_of(w, at)
    blobs, _ = compare.agreements(step, effort)
    if not all(b.agrees for b in blobs):
        return first_fault(step, effort, blobs), None
    if w.backward_step_net is None:
        return None, None
    mine = compare.by_jax(step)
    for name, by_net in _stored_gradients(w, step).items():
        if not compare.net_error(mine[name][0], by_net) <= effort.tolerance:
            text = f"the backward step net that it holds gives another gradient of {name!r} than its step net has"
            return text, _fault_in_backward_step(w, step, effort)
    return "the operators of its step net agree; the loop around them does not", None


def _fault_in_backward_step(w: Wiring, step: Subject, effort: Effort) -> WrittenFault | None:
    """The operator of a stored backward step net that is wrong, or None."""
    assert w.backward_step_net is not None
    seeds = _seeds_of_step(w, step)
    blobs = _with_seeds(step, seeds)
    return fault_in_backward_step(
        step.net, w.backward_step_net, seeds, blobs, step.key, effort.tolerance
    )


def _step_of(w: Wiring, at: Subject) -> Subject:
    """The first step as a subject, from random states: zero states make the gradients of weights zero."""
    rng = np.random.default_rng(0)
    sequence = at.blobs[w.inputs[0]]
    blobs = {**at.blobs, w.timestep: np.zeros(1, np.int32)}
    written: set[str] = set()
    for op in w.step_net.ops:
        written.update(op.outputs)
    for link in w.links:
        if link.external in w.inputs:
            blobs[link.internal] = at.blobs[link.external][link.offset : link.offset + link.window]
        elif link.internal not in written:
            k = w.states.index(link.external)
            first = np.asarray(initial_state(w, k, at.blobs[w.inputs[w.initial_ids[k]]], sequence))
            first = first[link.offset : link.offset + link.window]
            blobs[link.internal] = (
                rng.standard_normal(first.shape) if first.dtype == np.float64 else first
            )
    smooth = []
    for link in w.links:
        if link.external in w.smooth_states and link.internal in written:
            smooth.append(link.internal)
    ends = (*dict.fromkeys(smooth), *w.collected.values())
    net = replace(w.step_net, external_outputs=ends)
    needed = set(reads(net))
    blobs = {name: value for name, value in blobs.items() if name in needed}
    return _suffix(subject_of_net(net, blobs, key=at.key), 0)


def _seeds_of_step(w: Wiring, step: Subject) -> dict[str, str]:
    """The outputs of a step -> the blobs of their gradients, which the backward step net reads."""
    seeds = {}
    ends = {k.external: k.internal for k in w.links if k.internal in step.seeds} | w.collected
    for link in w.backward_links:
        new = ends.get(link.external.removesuffix("_grad"))
        if new is not None and (
            link.offset > 0 or link.external.removesuffix("_grad") in w.collected
        ):
            seeds[new] = link.internal
    return seeds


def _with_seeds(step: Subject, seeds: Renames) -> Values:
    """The blobs of a step and the gradients of its outputs."""
    blobs = dict(step.blobs)
    for output, name in seeds.items():
        blobs[name] = step.seeds[output][0]
    return blobs


def _stored_gradients(w: Wiring, step: Subject) -> Values:
    """The gradients of references and sequences that the backward step net writes, for the step's own seeds."""
    assert w.backward_step_net is not None
    blobs = _with_seeds(step, _seeds_of_step(w, step))
    run = replace(
        step.net,
        ops=(*step.net.ops, *w.backward_step_net.ops),
        external_inputs=(),
        external_outputs=(),
    )
    got = run_net(run, blobs, key=step.key, wide=True)
    names = dict(zip((w.inputs[k] for k in w.params), w.param_grads))
    inner = {k.external: k.internal for k in w.links}
    for n in w.sequences:
        for k in w.backward_links:
            if k.external == n + "_grad":
                names[inner[n]] = k.internal
    return {n: got[g] for n, g in names.items() if g in got and n in step.wrt}


# The equation at fault -------------------------------------------------------------------------------------------------


def fault_in_function(s: Subject, effort: Effort) -> Fault | None:
    """The equation nearest to the outputs whose gradient disagrees with central differences, or None."""
    point = s.point
    program = trace(
        lambda *values: list(s.function(dict(zip(point, values))).values()), list(point.values())
    )
    return _fault_in_equations(
        program, list(point.values()), list(_mixed(s).values()), effort, s.surrogates
    )


def _fault_in_equations(
    program: Program,
    args: Sequence[Any],
    seeds: Sequence[np.ndarray],
    effort: Effort,
    surrogates: Names,
) -> Fault | None:
    def is_wrong(k: int) -> bool:
        effort.doing(f"looking for the equation at fault, at {k + 1} of {len(program.eqns)}")
        return compare.disagree(
            _function_suffix(program, args, seeds, k, surrogates), effort, "difference"
        )

    if not is_wrong(0):
        return None
    k = _bisect(len(program.eqns), is_wrong)
    eqn = program.eqns[k]
    at = _function_suffix(program, args, seeds, k, surrogates)
    mine = compare.by_jax(at)
    where = {}
    for n in at.wrt:
        where[n] = compare.chosen(np.abs(np.asarray(mine[n])), effort.max_elements)
    differences = compare.element_differences(at, where)
    blobs = []
    for n in at.wrt:
        blobs.append(compare.agreement(at, n, mine[n], None, where[n], differences[n]))
    b = max(blobs, key=lambda b: b.difference_error)
    inside = None
    if eqn.primitive.name == "scan":
        env = _before(program, args, k)
        values = [jnp.asarray(read(env, v)) for v in eqn.invars]
        inside = _fault_in_step_of_scan(eqn, values, effort, surrogates)
    called = eqn.params.get("name") or rule_name(eqn)
    source = source_of(eqn)
    label = (
        f"{eqn.primitive.name}{f' of {called}' if called else ''}{f' ({source})' if source else ''}"
    )
    return Fault(
        label, eqn.primitive.name, b.name, b.worst, (b.values[0], None, b.values[2]), inside
    )


def _before(program: Program, args: Sequence[Any], k: int) -> dict[Var, Any]:
    """The values of all variables before equation number k."""
    known = zip((*program.constvars, *program.invars), (*program.consts, *args), strict=True)
    return evaluate(program.eqns[:k], dict(known))


def _function_suffix(
    program: Program,
    args: Sequence[Any],
    seeds: Sequence[np.ndarray],
    k: int,
    surrogates: Names,
) -> Subject:
    """The equations from number k on as a subject without a net."""
    env = _before(program, args, k)
    atoms: list[Any] = []
    for eqn in program.eqns[k:]:
        atoms += eqn.invars
    atoms += program.outvars
    names = {}
    blobs = {}
    for v in dict.fromkeys(v for v in atoms if isinstance(v, Var) and v in env):
        name = f"input {len(names)}"
        names[name] = v
        blobs[name] = np.asarray(env[v])
    wrt = tuple(names_of_floats(blobs))
    outputs = {f"output {i}": s for i, s in enumerate(seeds)}

    def function(point: Any) -> Values:
        known = dict(env)
        for name, value in point.items():
            known[names[name]] = value
        inner = evaluate(program.eqns[k:], known)
        return {y: read(inner, v) for y, v in zip(outputs, program.outvars)}

    s = Subject(Net("function"), blobs, wrt, outputs, function, exact=False, surrogates=surrogates)
    return replace(s, held=holding(function, s.point, surrogates))


def _fault_in_step_of_scan(
    eqn: Eqn, values: Sequence[Any], effort: Effort, surrogates: Names
) -> Fault | None:
    """The equation at fault within the first step of a scan, at a random point near the step's."""
    rng = np.random.default_rng(0)
    closed = eqn.params["jaxpr"]
    fixed = sum(scan_counts(eqn.params))
    args = []
    for i, value in enumerate(values):
        value = value if i < fixed else value[0]
        if value.dtype == np.float64:
            value = value + 0.1 * rng.standard_normal(value.shape)
        args.append(value)
    program = inlined(closed)
    outvars = []
    seeds = []
    for v in program.outvars:
        if v.aval.dtype == np.float64:
            outvars.append(v)
            seeds.append(rng.standard_normal((1, *v.aval.shape)))
    program = replace(program, outvars=tuple(outvars))
    return _fault_in_equations(program, args, seeds, effort, surrogates)
