"""Upgrades recurrent networks from every version of the wire format to the current one.

    version  since     what it writes
    1        2016-12   `param` and `recurrent_inputs` are names, `param_gradient`; `recurrent_sizes`; scratch blobs with
                       sizes, and links to them; `backward_alias_*`; `input_gradient_ids`; no output `step_workspaces`
    2        2017-01   `param` are numbers; `recurrent_inputs` and `recurrent_input_ids`; no sizes
    3        2017-03   `initial_recurrent_state_ids`, `outputs_with_grads`, an output `step_workspaces_*`; no scratch
    4        2017-04   `recompute_blobs_on_backward`; Alias operators bring parameter gradients to the names of outside
    5        2017-05   `param_grads`; step nets of type `rnn`
    6        2017-10   step nets are messages, not text, of type `simple`; `enable_rnn_executor`

Up to version 5, step nets are text, which the reader of nets parses; an empty text means that there is no net.
"""

from collections.abc import Sequence
from dataclasses import replace

from jrnn.errors import NetError, check_known
from jrnn.nets.graph.ssa import place_of
from jrnn.nets.ir import Ints, Net, Op, Values

STEP_NETS = ("step_net", "backward_step_net")
FORGOTTEN = (
    "backward_alias_dst", "backward_alias_offset", "backward_alias_src", "backward_scratch", "input_gradient_ids",
    "param_gradient", "recurrent_input_ids", "recurrent_inputs", "recurrent_sizes", "scratch", "scratch_sizes",
)  # fmt: skip


def upgrade(net: Net) -> Net:
    """Upgrades every recurrent network to the current version of the wire format; other operators do not change.

    RecurrentNetworkGradient operators can be upgraded from version 3 on. Older ones order their blobs differently: remove
    them, and make the backward pass again with `add_gradients`.

    Raises:
        NetError: for an argument that names a blob which the operator does not read, or for an older gradient operator.

    >>> step = Net("step", (Op.of("Sum", ["h_prev", "x_t"], ["h"]),), type="rnn")
    >>> old = Op.of("RecurrentNetwork", ["x", "h0"], ["all"], recurrent_inputs=["h0"], step_net=step, alias_dst=["all"])
    >>> new = upgrade(Net("net", (old,))).ops[0]
    >>> new.outputs, *new.arg("initial_recurrent_state_ids"), new.arg("step_net").type
    (('all', 'all_step_workspaces'), 1, 'simple')
    """
    return replace(net, ops=tuple(_upgrade_op(net, k, op) for k, op in enumerate(net.ops)))


def _upgrade_op(net: Net, index: int, op: Op) -> Op:
    op = op.map_sub_nets(upgrade)
    try:
        if op.type == "RecurrentNetwork":
            op = upgrade_arguments(op, op.inputs)
            if not op.outputs or op.outputs[-1] in op.names("alias_dst"):
                first = op.outputs[0] if op.outputs else "recurrent"
                op = replace(op, outputs=(*op.outputs, f"{first}_step_workspaces"))
            if op.arg("enable_rnn_executor") is None:
                op = op.with_args({"enable_rnn_executor": 1})
        elif op.type == "RecurrentNetworkGradient":
            check_gradient_version(op)
            op = upgrade_arguments(op, op.inputs[len(op.integers("outputs_with_grads")) :])
    except NetError as e:
        raise e.at(place_of(net, index)) from None
    return op


def check_gradient_version(op: Op) -> None:
    """Raises NetError for a RecurrentNetworkGradient of version 1 or 2.

    The order of its inputs is not documented anywhere, only its arguments are. An operator that `add_gradients` makes from
    a forward operator of such a version has the old arguments, but the current order of inputs.
    """
    if op.arg("outputs_with_grads") is None and _forgotten_in(op):
        raise NetError(
            "is of a version before 2017-03; remove it and make the gradients again with add_gradients"
        )


def _forgotten_in(op: Op) -> list[str]:
    """Returns the arguments of an operator that the current version does not have."""
    return [name for name in FORGOTTEN if op.arg(name) is not None]


def upgrade_arguments(op: Op, inputs: Sequence[str]) -> Op:
    """Gives a recurrent operator the arguments of the current version; `inputs` are the inputs of the forward operator.

    An operator that has them already does not change.
    """
    changes: Values = {}
    for name in STEP_NETS:
        value = op.arg(name)
        if value == b"":
            changes[name] = None
        if not isinstance(value, Net):
            continue
        is_text = next(arg.kind for arg in op.args if arg.name == name) == "s"
        if name != STEP_NETS[0] and not value.ops:
            changes[name] = None
        elif value.type == "rnn":
            changes[name] = replace(value, type="simple")
        elif is_text:
            changes[name] = value

    forgotten = _forgotten_in(op)
    params: Sequence[int] = op.integers("param")
    names = op.names("param")
    if names:
        params = _positions("param", names, inputs)
        changes["param"] = params
    is_old = bool(names or forgotten)

    if op.arg("initial_recurrent_state_ids") is None and is_old:
        ids = op.integers("recurrent_input_ids")
        if not ids:
            ids = _positions("recurrent_inputs", op.names("recurrent_inputs"), inputs)
        changes["initial_recurrent_state_ids"] = ids
    if params and op.arg("param_grads") is None:
        gradients = op.arg("param_gradient")
        if gradients is None:  # the backward step net writes these names
            gradients = [_input("param", k, inputs) + "_grad" for k in params]
        changes["param_grads"] = gradients
    if is_old:
        changes |= _without_scratch(op, inputs)
        is_trained = op.arg(STEP_NETS[1]) or op.arg("backward_link_internal")
        if op.arg("outputs_with_grads") is None and is_trained:
            changes["outputs_with_grads"] = [0]  # the gradient of no other output was taken
        changes |= dict.fromkeys(forgotten)
    return op.with_args(changes) if changes else op


def _positions(argument: str, names: Sequence[str], inputs: Sequence[str]) -> Ints:
    for name in names:
        check_known(
            name, inputs, NetError, f"argument {argument!r} names {name!r}, which is no input"
        )
    return tuple(inputs.index(name) for name in names)


def _input(argument: str, k: int, inputs: Sequence[str]) -> str:
    if not 0 <= k < len(inputs):
        raise NetError(f"argument {argument!r} holds {k}, but there are {len(inputs)} inputs")
    return inputs[k]


def _without_scratch(op: Op, inputs: Sequence[str]) -> Values:
    """Returns the lists of links without those to scratch blobs, which only stored local blobs of a step."""
    sequences = {*inputs, *op.names("recurrent_states")}
    gradients = {name + "_grad" for name in sequences}
    changes: Values = {}
    for prefix, targets in (("", sequences), ("backward_", gradients)):
        links = zip(
            op.names(f"{prefix}link_internal"),
            op.names(f"{prefix}link_external"),
            op.integers(f"{prefix}link_offset"),
        )
        remaining = [link for link in links if link[1] in targets]
        if remaining:
            internal, external, offsets = zip(*remaining)
            changes[f"{prefix}link_internal"] = internal
            changes[f"{prefix}link_external"] = external
            changes[f"{prefix}link_offset"] = offsets
    return changes
