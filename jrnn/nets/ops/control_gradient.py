"""Gradients of Do, If and While, as nets.

A gradient Do runs the gradient of its net in the workspace that the forward Do stored. A gradient If takes the branch that
was taken. A gradient While repeats the trips in reverse: it runs while there is a stored workspace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jrnn.errors import GradientError
from jrnn.nets.autodiff import backward_pass
from jrnn.nets.gradient_maker import GradientMaker, GradientSlice
from jrnn.nets.graph.scope import reads
from jrnn.nets.ir import Net, Op
from jrnn.nets.ops.control import bindings
from jrnn.nets.registry import ACCUMULATE, SAVE, SEED, gradient

GIVEN = "/_DO_OPERATOR_INNER_GRAD_"
FOUND = "/_DO_OPERATOR_INNER_GRAD_COPY_"


def _gradient_outputs(g: GradientMaker) -> dict[str, str]:
    """Outputs that gradients arrive at -> the names of these gradients."""
    return {name: g.grad_output(k) for k, name in enumerate(g.op.outputs) if g.has_grad_output(k)}


def _dense(gradient, name: str) -> str | None:
    if isinstance(gradient, GradientSlice):
        raise GradientError(
            f"the gradient of {name!r} is sparse, which cannot leave its net; give the operator that reads {name!r} "
            "dense_gradient=1"
        )
    return gradient


@gradient("Do")
def do_gradient_maker(g):
    arriving = _gradient_outputs(g)
    net = g.arg("net")
    bound = bindings(g.op)
    inner_of = {outer: inner for inner, outer in bound.items()}
    written = {o for op in net.ops for o in op.outputs}
    names = g.input_names
    for outer, given in arriving.items():
        if inner_of[outer] not in written and outer in names:
            g.set_grad(names.index(outer), given)
    seeds = {inner_of[o]: inner_of[o] + GIVEN for o in arriving if inner_of[o] in written}
    if not seeds:
        return
    result = backward_pass(net.ops, seeds, net.name, external=bound)
    g.replace_op(g.op.with_args({"net": replace(net, ops=result.forward)}))
    ops = list(result.ops)
    inner = []
    outer_inputs = []
    outer_outputs = []
    for k, outer in enumerate(names):
        inner_gradient = _dense(result.gradients.get(inner_of.get(outer)), outer)
        if outer not in inner_of or inner_gradient is None or k in g.answers:
            continue
        copy = inner_of[outer] + FOUND
        ops.append(Op.of(SAVE, [inner_gradient], [copy]))
        inner.append(copy)
        outer_outputs.append(g.grad_input(k))
    if not outer_outputs:
        return
    inner_inputs = []
    saved = []
    for name in reads(Net("", tuple(ops))):
        if name in seeds.values():
            outer_inputs.append(arriving[bound[name.removesuffix(GIVEN)]])
            inner_inputs.append(name)
        elif name in bound and not g.arg("copy_external_blobs"):
            outer = bound[name]
            value = (
                g.output(g.op.outputs.index(outer))
                if outer in g.op.outputs
                else g.input(names.index(outer))
            )
            outer_inputs.append(value)
            inner_inputs.append(name)
        else:
            saved.append(name)
    workspace = g.op.outputs[-1]
    count = len(outer_inputs)
    g.emit(
        "Do",
        [*outer_inputs, workspace],
        [*outer_outputs, workspace],
        copy_args=False,
        net=Net(net.name + "_grad", tuple(ops)),
        inner_blobs=[*inner, *inner_inputs],
        outer_blobs_idx=[*range(count, count + len(inner)), *range(count)],
        saved_fwd_blobs=saved,
    )


def _outer_values(g: GradientMaker, ops: Iterable[Op]) -> dict[str, str]:
    """Blobs of the forward operator that gradient operators read -> the blobs that hold their values."""
    values = {}
    for name in reads(Net("", tuple(ops))):
        if name in g.op.outputs:
            values[name] = g.output(g.op.outputs.index(name))
        elif name in g.op.inputs:
            values[name] = g.input(g.op.inputs.index(name))
    return values


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    return replace(
        op,
        inputs=tuple(names.get(n, n) for n in op.inputs),
        outputs=tuple(names.get(n, n) for n in op.outputs),
    )


def _branch_gradient(net: Net, arriving: Mapping[str, str], external: Iterable[str]):
    """The backward pass of a net that runs in its operator's workspace; it must not need copies of overwritten blobs."""
    written = {o for op in net.ops for o in op.outputs}
    result = backward_pass(
        net.ops, {o: a for o, a in arriving.items() if o in written}, net.name, external=external
    )
    if len(result.forward) != len(net.ops):
        raise GradientError(
            f"net {net.name!r} overwrites a blob that its gradient needs; put its operators in one Do"
        )
    return result, written


def _apart(g: GradientMaker, ops: Iterable[Op], keep: set[str]) -> list[Op]:
    """Renames the local blobs of a branch or body, which share the outer workspace."""
    names: dict[str, str] = {}
    renamed = []
    for op in ops:
        inputs = tuple(
            names.get(n, n) for n in op.inputs
        )  # before the first write a name refers to the outer blob
        for o in op.outputs:
            if o not in keep and o not in names:
                names[o] = g.temporary(o + "_inside")
        renamed.append(
            replace(op, inputs=inputs, outputs=tuple(names.get(n, n) for n in op.outputs))
        )
    return renamed


@gradient("If")
def if_gradient_maker(g):
    arriving = _gradient_outputs(g)
    branches = [g.arg("then_net"), g.arg("else_net") or Net(g.arg("then_net").name + "_auto_else")]
    names = g.input_names
    parts = [_branch_gradient(net, arriving, names) for net in branches]
    g.replace_op(
        g.op.with_args(
            {
                arg: replace(net, ops=result.forward)
                for arg, net, (result, _) in zip(("then_net", "else_net"), branches, parts)
                if g.arg(arg) is not None
            }
        )
    )
    nets = [list(result.ops) for result, _ in parts]
    written_in = [{o for op in ops for o in op.outputs} for ops in nets]
    taken: list[set[str]] = [set(), set()]
    targets = []
    for k, name in enumerate(names):
        if name in names[:k]:
            continue
        gradients = [_dense(result.gradients.get(name), name) for result, _ in parts]
        for which, (_, written) in enumerate(parts):
            if gradients[which] is None and name in arriving and name not in written:
                gradients[which] = arriving[name]
        if gradients == [None, None]:
            continue
        target = g.grad_input(k)
        targets.append(target)
        for which, part in enumerate(gradients):
            if part is None:
                nets[which].append(Op.of(SEED, [name], [target], value=0.0))
            elif part in written_in[which] and part not in taken[which]:
                nets[which] = [_renamed(op, {part: target}) for op in nets[which]]
                taken[which].add(part)
            else:
                nets[which].append(Op.of(SAVE, [part], [target]))
    if not targets:
        return
    nets = [_apart(g, ops, keep={*targets, *g.op.outputs}) for ops in nets]
    values = _outer_values(g, [*nets[0], *nets[1]])
    nets = [[_renamed(op, values) for op in ops] for ops in nets]
    workspaces = [
        n
        for n in dict.fromkeys(o for ops in nets for op in ops for o in op.outputs)
        if n in g.op.outputs
    ]
    read = dict.fromkeys(n for ops in nets for n in reads(Net("", tuple(ops))))
    condition = g.input(0)
    g.emit(
        "If",
        [condition, *(n for n in read if n != condition)],
        [*targets, *workspaces],
        copy_args=False,
        **{
            arg: Net(net.name + "_grad", tuple(ops))
            for arg, net, ops in zip(("then_net", "else_net"), branches, nets)
        },
    )


@gradient("While")
def while_gradient_maker(g):
    arriving = _gradient_outputs(g)
    net = g.arg("loop_net")
    cond_net = g.arg("cond_net") or Net()
    if any(op.type != "Do" or not op.arg("copy_external_blobs") for op in net.ops) or not net.ops:
        raise GradientError(
            "only a loop whose body is Do operators with copy_external_blobs=1 has a gradient"
        )
    names = g.input_names
    total = {n: g.temporary(n + "_grad_total") for n in dict.fromkeys([*names, *g.op.outputs])}
    carried = set(arriving)
    while True:  # until all blobs whose gradients are carried from trip to trip are known
        result, written = _branch_gradient(
            net, {n: total[n] for n in g.op.outputs if n in carried}, names
        )
        more = carried | {n for n in written if n in result.gradients}
        if more == carried:
            break
        carried = more
    changed = [o for op in cond_net.ops for o in op.outputs if o in carried]
    if changed:
        raise GradientError(
            f"the condition changes {changed[0]!r}, which has a gradient; change it in the body"
        )
    g.replace_op(g.op.with_args({"loop_net": replace(net, ops=result.forward)}))
    invariant = [n for n in dict.fromkeys(names) if n in result.gradients and n not in written]
    loop_carried = [
        n for n in dict.fromkeys([*names, *g.op.outputs]) if n in carried and n in written
    ]
    untouched = [n for n in arriving if n not in written]

    workspace = net.ops[-1].outputs[-1]
    goes_on = g.temporary(f"{workspace}_has_scope")
    body = list(result.ops)
    after = {n: g.temporary(n + "_grad_after") for n in loop_carried}
    for n in loop_carried:
        kept = _dense(result.gradients.get(n), n)
        if kept is None:
            body.append(Op.of(SEED, [total[n]], [after[n]], value=0.0))
        else:
            body.append(Op.of(SAVE, [kept], [after[n]]))
    body += [
        Op.of(ACCUMULATE, [total[n], _dense(result.gradients[n], n)], [total[n]]) for n in invariant
    ]
    body += [Op.of(SAVE, [after[n]], [total[n]]) for n in loop_carried]

    body = _apart(g, body, keep={*total.values(), *g.op.outputs})
    g.emit("HasScope", [workspace], [goes_on], copy_args=False)
    for n in loop_carried:
        if n in arriving:
            g.emit(SAVE, [arriving[n]], [total[n]], copy_args=False)
        else:
            g.emit(SEED, [g.output(g.op.outputs.index(n))], [total[n]], copy_args=False, value=0.0)
    for n in invariant:
        g.emit(SEED, [g.input(names.index(n))], [total[n]], copy_args=False, value=0.0)
    totals = [total[n] for n in (*loop_carried, *invariant)]
    read = [n for n in reads(Net("", tuple(body))) if n not in (*totals, workspace)]
    g.emit(
        "While",
        [goes_on, *totals, *read, workspace],
        [*totals, goes_on, workspace],
        copy_args=False,
        loop_net=Net(net.name + "_grad", tuple(body)),
        cond_net=Net(cond_net.name + "_grad", (Op.of("HasScope", [workspace], [goes_on]),)),
    )
    for n in (*loop_carried, *invariant):
        if n in names:
            g.emit(SAVE, [total[n]], [g.grad_input(names.index(n))], copy_args=False)
    for n in untouched:
        if n in names:
            g.set_grad(names.index(n), arriving[n])
