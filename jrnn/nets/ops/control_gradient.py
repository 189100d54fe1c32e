"""Gradients of Do, If and While, as nets.

A gradient Do runs the gradient of its net in the workspace that the forward Do stored. A gradient If takes the branch that
was taken. A gradient While repeats the trips in reverse: it runs while there is a stored workspace.
"""

from collections.abc import Iterable
from dataclasses import replace

from jrnn.errors import GradientError
from jrnn.nets.autodiff import BackwardPass, backward_pass
from jrnn.nets.gradient_maker import Gradient, GradientMaker, GradientSlice
from jrnn.nets.graph.rename import new_names, with_names
from jrnn.nets.graph.scope import reads
from jrnn.nets.ir import NameSet, Net, Op, Renames, written_by
from jrnn.nets.ops.control import bindings
from jrnn.nets.registry import ACCUMULATE, SAVE, SEED, gradient

BRANCHES = ("then_net", "else_net")
GIVEN = "/_DO_OPERATOR_INNER_GRAD_"
FOUND = "/_DO_OPERATOR_INNER_GRAD_COPY_"


def _gradient_outputs(g: GradientMaker) -> dict[str, str]:
    """Outputs that gradients arrive at -> the names of these gradients."""
    return {name: g.grad_output(k) for k, name in enumerate(g.op.outputs) if g.has_grad_output(k)}


def _reads(ops: Iterable[Op]) -> list[str]:
    """The blobs that operators read from outside, each once, in order."""
    return reads(Net("", tuple(ops)))


def _value(g: GradientMaker, name: str) -> str:
    """The blob that holds the value of an output or an input of the forward operator after it has run."""
    if name in g.op.outputs:
        return g.output(g.op.outputs.index(name))
    return g.input(g.input_names.index(name))


def _dense(gradient: Gradient | None, name: str) -> str | None:
    """The gradient of a blob, which must not be sparse."""
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
    written = written_by(net.ops)
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
    for name in _reads(ops):
        if name in seeds.values():
            outer_inputs.append(arriving[bound[name.removesuffix(GIVEN)]])
            inner_inputs.append(name)
        elif name in bound and not g.arg("copy_external_blobs"):
            outer_inputs.append(_value(g, bound[name]))
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
    for name in _reads(ops):
        if name in g.op.outputs or name in g.op.inputs:
            values[name] = _value(g, name)
    return values


def _branch_gradient(
    net: Net, arriving: Renames, external: Iterable[str]
) -> tuple[BackwardPass, NameSet]:
    """The backward pass of a net that runs in its operator's workspace; it must not need copies of overwritten blobs.

    Returns the blobs that the net writes, too.
    """
    written = written_by(net.ops)
    seeds = {name: gradient for name, gradient in arriving.items() if name in written}
    result = backward_pass(net.ops, seeds, net.name, external=external)
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
        # Before the first write, a name refers to the outer blob.
        inputs = new_names(op.inputs, names)
        for name in op.outputs:
            if name not in keep and name not in names:
                names[name] = g.temporary(name + "_inside")
        renamed.append(replace(op, inputs=inputs, outputs=new_names(op.outputs, names)))
    return renamed


@gradient("If")
def if_gradient_maker(g):
    arriving = _gradient_outputs(g)
    branches = [g.arg("then_net"), g.arg("else_net") or Net(g.arg("then_net").name + "_auto_else")]
    names = g.input_names
    parts = [_branch_gradient(net, arriving, names) for net in branches]
    for argument, net, (result, _) in zip(BRANCHES, branches, parts):
        if g.arg(argument) is not None:
            g.replace_op(g.op.with_args({argument: replace(net, ops=result.forward)}))

    # Both branches write the gradient of each input under one name.
    nets = [list(result.ops) for result, _ in parts]
    written_in = [written_by(ops) for ops in nets]
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
                nets[which] = [with_names(op, {part: target}, {part: target}) for op in nets[which]]
                taken[which].add(part)
            else:
                nets[which].append(Op.of(SAVE, [part], [target]))
    if not targets:
        return
    nets = [_apart(g, ops, keep={*targets, *g.op.outputs}) for ops in nets]
    values = _outer_values(g, [*nets[0], *nets[1]])

    gradient_nets = {}
    written: NameSet = {}
    condition = g.input(0)
    read = {condition: None}
    for argument, net, ops in zip(BRANCHES, branches, nets):
        gradient_net = Net(net.name + "_grad", tuple(with_names(op, values, values) for op in ops))
        gradient_nets[argument] = gradient_net
        written.update(written_by(gradient_net.ops))
        read.update(dict.fromkeys(reads(gradient_net)))
    workspaces = [name for name in written if name in g.op.outputs]
    g.emit("If", read, [*targets, *workspaces], copy_args=False, **gradient_nets)


@gradient("While")
def while_gradient_maker(g):
    arriving = _gradient_outputs(g)
    net = g.arg("loop_net")
    cond_net = g.arg("cond_net") or Net()
    has_gradient = bool(net.ops)
    for op in net.ops:
        has_gradient &= op.type == "Do" and bool(op.arg("copy_external_blobs"))
    if not has_gradient:
        raise GradientError(
            "only a loop whose body is Do operators with copy_external_blobs=1 has a gradient"
        )
    names = g.input_names
    blobs = dict.fromkeys([*names, *g.op.outputs])
    total = {name: g.temporary(name + "_grad_total") for name in blobs}
    carried = set(arriving)
    while True:  # until all blobs whose gradients are carried from trip to trip are known
        seeds = {name: total[name] for name in g.op.outputs if name in carried}
        result, written = _branch_gradient(net, seeds, names)
        more = carried.union(filter(result.gradients.__contains__, written))
        if more == carried:
            break
        carried = more
    for name in written_by(cond_net.ops):
        if name in carried:
            raise GradientError(
                f"the condition changes {name!r}, which has a gradient; change it in the body"
            )
    g.replace_op(g.op.with_args({"loop_net": replace(net, ops=result.forward)}))

    invariant = []
    for name in dict.fromkeys(names):
        if name in result.gradients and name not in written:
            invariant.append(name)
    loop_carried = [name for name in blobs if name in carried and name in written]

    # The body: the gradients before a trip from the gradients after it.
    workspace = net.ops[-1].outputs[-1]
    goes_on = g.temporary(f"{workspace}_has_scope")
    body = list(result.ops)
    after = {name: g.temporary(name + "_grad_after") for name in loop_carried}
    for name in loop_carried:
        inner_gradient = _dense(result.gradients.get(name), name)
        if inner_gradient is None:
            body.append(Op.of(SEED, [total[name]], [after[name]], value=0.0))
        else:
            body.append(Op.of(SAVE, [inner_gradient], [after[name]]))
    for name in invariant:
        terms = [total[name], _dense(result.gradients[name], name)]
        body.append(Op.of(ACCUMULATE, terms, [total[name]]))
    for name in loop_carried:
        body.append(Op.of(SAVE, [after[name]], [total[name]]))
    body = _apart(g, body, keep={*total.values(), *g.op.outputs})

    # The loop starts with the gradients that arrive, and ends with the gradients of its inputs.
    g.emit("HasScope", [workspace], [goes_on], copy_args=False)
    for n in loop_carried:
        if n in arriving:
            g.emit(SAVE, [arriving[n]], [total[n]], copy_args=False)
        else:
            g.emit(SEED, [g.output(g.op.outputs.index(n))], [total[n]], copy_args=False, value=0.0)
    for n in invariant:
        g.emit(SEED, [g.input(names.index(n))], [total[n]], copy_args=False, value=0.0)
    totals = [total[n] for n in (*loop_carried, *invariant)]
    read = [n for n in _reads(body) if n not in (*totals, workspace)]
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
    for n in arriving:
        if n in names and n not in written:
            g.set_grad(names.index(n), arriving[n])
