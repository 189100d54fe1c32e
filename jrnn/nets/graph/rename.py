"""Renaming blobs, one version or all, through arguments and sub-nets.

A blob is renamed everywhere: in the inputs, outputs and arguments of operators, in sub-nets that see it, and in the net's
own lists. If an operator may keep the old value of an output (a branch that is not taken), the versions before and after it
must have one name, and are renamed together.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from jrnn.errors import NetError
from jrnn.nets.graph.scope import (
    GRADIENT_NAMES,
    GRADIENT_SUFFIX,
    INNER_NAMES,
    READ_NAMES,
    RENAME_SUFFIX,
    WRITTEN_NAMES,
    Workspace,
    all_names,
    has_sub_nets,
    reads,
    step_reads,
    workspace_names,
    workspace_of,
)
from jrnn.nets.graph.ssa import Access, Versioned, check_index, get_accesses, place_of
from jrnn.nets.ir import Arg, Names, Net, Op, Renames, map_ops, nets_of


def new_names(names: Iterable[str], new: Renames) -> Names:
    """Returns names, each replaced by its new name if it has one."""
    return tuple(new.get(name, name) for name in names)


def with_names(op: Op, read: Renames, written: Renames) -> Op:
    """Returns the operator with other inputs and outputs."""
    return replace(op, inputs=new_names(op.inputs, read), outputs=new_names(op.outputs, written))


def _map_names(arg: Arg, names: Renames) -> Arg:
    """Returns an argument with its strings replaced; other values are unchanged."""
    if arg.kind not in ("s", "strings") or isinstance(arg.value, Net):
        return arg
    changed = tuple(map(str.encode, new_names(arg.names(), names)))
    return replace(arg, value=changed if arg.kind == "strings" else changed[0])


def _merged(first: Renames, second: Renames) -> Renames:
    """Merges two maps; the first one wins. The same large map is not copied."""
    return first if first is second else {**second, **first}


def _gradient_name(name: str, blobs: Renames) -> str:
    """Returns the new name of a gradient whose blob is renamed; other names are unchanged."""
    blob = name.removesuffix(GRADIENT_SUFFIX)
    if blob == name or blob not in blobs:
        return name
    return blobs[blob] + GRADIENT_SUFFIX


def _rename_arg(arg: Arg, read: Renames, written: Renames, inner: Renames) -> Arg:
    if arg.name in READ_NAMES:
        return _map_names(arg, _merged(read, written))
    if arg.name in WRITTEN_NAMES:
        return _map_names(arg, _merged(written, read))
    if arg.name in GRADIENT_NAMES and arg.kind == "strings":
        gradients = tuple(_gradient_name(name, read).encode() for name in arg.names())
        return replace(arg, value=gradients)
    if arg.name in INNER_NAMES and inner:
        return _map_names(arg, inner)
    if arg.name.endswith(RENAME_SUFFIX):
        name = _gradient_name(arg.name.removesuffix(RENAME_SUFFIX), read) + RENAME_SUFFIX
        return replace(_map_names(arg, _merged(written, read)), name=name)
    return arg


def _name_gradients(op: Op, new_op: Op) -> Op:
    """Adds `.rename` arguments for gradients whose names no longer follow from the names of their blobs.

    Caffe2 applies these arguments to the step nets too, so a blob of the same name there is renamed as well.
    """
    known = {arg.name for arg in new_op.args}
    outputs = dict(zip(op.outputs, new_op.outputs))
    arguments = {}
    for old, new in dict(zip(op.inputs, new_op.inputs)).items():
        argument = new + GRADIENT_SUFFIX + RENAME_SUFFIX
        gradient = outputs.get(old + GRADIENT_SUFFIX)
        if gradient not in (None, new + GRADIENT_SUFFIX) and argument not in known:
            arguments[argument] = gradient
    if not arguments:
        return new_op

    local = _names_in_sub_nets(new_op)
    inner = {}
    for argument, gradient in arguments.items():
        usual = argument.removesuffix(RENAME_SUFFIX)
        if usual in local:
            inner[usual] = gradient
    if inner:
        _check_not_local(op, inner, local)
        new_op = new_op.map_sub_nets(lambda net: rename_blobs(net, inner))
        args = (_map_names(a, inner) if a.name in INNER_NAMES else a for a in new_op.args)
        new_op = replace(new_op, args=tuple(args))
    return new_op.with_args(arguments)


def _names_in_sub_nets(op: Op) -> set[str]:
    """Returns every name of a blob in the sub-nets of an operator."""
    return set().union(*map(all_names, nets_of(op)))


def _with_param_grads(op: Op) -> Op:
    """Adds the names of the parameters' gradients in the step nets, which old nets derive from the inputs' names."""
    params = op.integers("param")
    if not params or op.names("param_grads"):
        return op
    is_gradient = set(op.outputs).isdisjoint(op.names("alias_dst"))
    inputs = op.inputs
    if is_gradient:
        inputs = inputs[len(op.integers("outputs_with_grads")) :]
    if not all(0 <= k < len(inputs) for k in params):
        raise NetError(
            f"argument 'param' holds {list(params)}, but there are {len(inputs)} inputs to name"
        )
    return op.with_args({"param_grads": [inputs[k] + GRADIENT_SUFFIX for k in params]})


def _in_step_nets(op: Op, names: Renames) -> dict[str, str]:
    """Returns the part of `names` that step nets see."""
    seen = step_reads(op)
    changes = {name: names[name] for name in seen if names.get(name, name) != name}
    if changes:
        _check_not_local(op, changes, _names_in_sub_nets(op).difference(seen))
    return changes


def _check_not_local(op: Op, names: Renames, local: Collection[str]) -> None:
    for old, new in names.items():
        if new in local:
            raise NetError(
                f"cannot rename {old!r} to {new!r}: a sub-net of {op.type} has its own; choose another name"
            )


def rename_in_op(op: Op, read: Renames, written: Renames) -> Op:
    """Renames the blobs that `op` reads and writes; names not in the maps stay.

    Raises:
        NetError: a sub-net that sees a renamed blob has a blob of its own under the new name.

    >>> op = Op.of("Relu", ["x"], ["x"])
    >>> rename_in_op(op, {"x": "a"}, {"x": "b"}) == Op.of("Relu", ["a"], ["b"])
    True
    """
    new_op = with_names(op, read, written)
    if not op.args:
        return new_op

    # The names in sub-nets, which follow from the kind of workspace.
    inner: Renames = {}
    args = op.args
    if has_sub_nets(op):
        changed = op
        kind = workspace_of(op)
        if kind is Workspace.SHARED:
            inner = _merged(written, read)
        elif kind is Workspace.STEP:
            inner = _in_step_nets(op, read)
        if inner and kind is Workspace.STEP:
            changed = _with_param_grads(changed)
        if inner:
            changed = changed.map_sub_nets(lambda net: rename_blobs(net, inner))
        args = changed.args

    args = tuple(_rename_arg(a, read, written, inner) for a in args)
    new_op = replace(new_op, args=args)
    if any(arg.name in GRADIENT_NAMES for arg in args):
        return _name_gradients(op, new_op)
    return new_op


def rename_in_workspace(op: Op, names: Renames, *, top: bool = True) -> Op:
    """Renames blobs in `op`: its own (`top`), and the blobs of sub-nets in its workspace, but no argument values."""

    def rename_inner(inner: Op) -> Op:
        return rename_in_workspace(inner, names)

    if top:
        op = with_names(op, names, names)
    if workspace_of(op) is not Workspace.SHARED:
        return op
    return op.map_sub_nets(lambda net: map_ops(net, rename_inner))


def rename_blobs(net: Net, names: Renames) -> Net:
    """Renames every version of the blobs in `names`, also in sub-nets that see them.

    Two blobs may get one name; the caller must ensure that this keeps the meaning.

    Raises:
        NetError: a sub-net that sees a renamed blob has a blob of its own under the new name.
    """
    return replace(
        net,
        ops=tuple(rename_in_op(op, names, names) for op in net.ops),
        external_inputs=new_names(net.external_inputs, names),
        external_outputs=new_names(net.external_outputs, names),
    )


def _rename_versions(net: Net, start: Mapping[str, int], choose: Callable[[str, int], str]) -> Net:
    """Renames every blob to `choose(name, version)`; versions continue from `start`."""
    accesses, last = get_accesses(net, start)

    def chosen(versions: Mapping[str, int]) -> dict[str, str]:
        changes = {}
        for name, version in versions.items():
            new = choose(name, version)
            if new != name:
                changes[name] = new
        return changes

    ops = []
    for op, access in zip(net.ops, accesses):
        read = chosen(access.reads)
        written = chosen(access.writes)
        if read or written:
            op = rename_in_op(op, read, written)
        ops.append(op)
    return replace(
        net,
        ops=tuple(ops),
        external_inputs=tuple(choose(n, start.get(n, 0)) for n in net.external_inputs),
        external_outputs=tuple(choose(n, last.get(n, 0)) for n in net.external_outputs),
    )


def _ties(accesses: list[Access]) -> dict[Versioned, int]:
    """Returns the first version with the same name for each versioned blob that must share its predecessor's name."""
    first: dict[Versioned, int] = {}
    for access in accesses:
        for name in access.updates:
            before = access.reads[name]
            first[name, access.writes[name]] = first.get((name, before), before)
    return first


def _tied_versions(blob: Versioned, ties: Collection[Versioned]) -> set[int]:
    """Returns the versions that must have the same name as `blob`."""
    name, first = blob
    last = first
    while (name, first) in ties:
        first -= 1
    while (name, last + 1) in ties:
        last += 1
    return set(range(first, last + 1))


def _check_fresh(new_name: str, nets: list[Net]) -> None:
    for net in nets:
        if new_name in all_names(net):
            raise NetError(
                f"cannot rename to {new_name!r}: net {net.name!r} has a blob of that name; choose another"
            )


def _item(what: str, names: Names, index: int, where: str) -> str:
    if not 0 <= index < len(names):
        raise NetError(
            f"{where} has {len(names)} {what}s, number {index} was asked for; count from 0"
        )
    return names[index]


def rename_op_output(net: Net, op_id: int, output_id: int, new_name: str) -> Net:
    """Renames one output of one operator, for all readers of that version of the blob.

    An external output of the net is renamed if it gives this version.

    Raises:
        NetError: there is no such output, or the net already has a blob of the new name.

    >>> net = Net("n", (Op.of("Relu", ["x"], ["x"]), Op.of("Tanh", ["x"], ["y"])), ("x",), ("y",))
    >>> [(op.inputs, op.outputs) for op in rename_op_output(net, 0, 0, "r").ops]
    [(('x',), ('r',)), (('r',), ('y',))]
    """
    check_index(net, op_id)
    old = _item("output", net.ops[op_id].outputs, output_id, place_of(net, op_id))
    if old == new_name:
        return net
    _check_fresh(new_name, [net])
    accesses, _ = get_accesses(net)
    versions = _tied_versions((old, accesses[op_id].writes[old]), _ties(accesses))
    return _rename_versions(net, {}, lambda n, v: new_name if n == old and v in versions else n)


def rename_op_input(
    net: Net, init_net: Net, op_id: int, input_id: int, new_name: str, from_producer: bool = False
) -> tuple[Net, Net]:
    """Renames one input of one operator of a predict net, also in its init net.

    The blob is renamed in the operator that makes it, in either net, and in the nets' external inputs and outputs.

    Args:
        from_producer: also rename it for other operators that read it. Without this, the operator must be the only reader.

    Returns:
        The new `(net, init_net)`.

    Raises:
        NetError: there is no such input, the net already has a blob of the new name, or (without `from_producer`) another
            operator or a sub-net of one reads the blob too.
    """
    check_index(net, op_id)
    where = place_of(net, op_id)
    old = _item("input", net.ops[op_id].inputs, input_id, where)
    if old == new_name:
        return net, init_net
    _check_fresh(new_name, [net, init_net])
    initial, start = get_accesses(init_net)
    accesses, _ = get_accesses(net, start)
    version = accesses[op_id].reads[old]
    for index, access in enumerate(accesses):
        is_reader = index != op_id and access.reads.get(old) == version
        if is_reader and not from_producer:
            raise NetError(
                f"{where}: its input {old!r} is read by {place_of(net, index)} too; pass from_producer=True to rename "
                "both"
            )
    versions = _tied_versions((old, version), {**_ties(initial), **_ties(accesses)})

    def choose(name: str, at: int) -> str:
        return new_name if name == old and at in versions else name

    return _rename_versions(net, start, choose), _rename_versions(init_net, {}, choose)


def ssa_rewrite(net: Net, *, number_all: bool = False) -> Net:
    """Gives every version of every blob a unique name, `name_version`.

    Version 0 keeps its name, and so does a blob with only one version. With `number_all`, every blob is numbered, version
    0 included (the older of Caffe2's two rewrites; use it with `number_init_net`). Sub-nets use the new names of outer
    blobs, and keep the names of their own. Versions before and after an operator that may keep the old value of its output
    have one name. Idempotent without `number_all`.

    If another blob already has the new name, a `_` is added, unlike in Caffe2.

    >>> net = Net("n", (Op.of("Relu", ["x"], ["x"]), Op.of("Tanh", ["x"], ["y"])), ("x",), ("x", "y"))
    >>> ssa_rewrite(net).external_outputs, ssa_rewrite(net, number_all=True).external_outputs
    (('x_1', 'y'), ('x_1', 'y_1'))
    """
    accesses, _ = get_accesses(net)
    ties = _ties(accesses)
    seen: dict[str, set[int]] = {}
    for a in accesses:
        for name, version in a.blobs:
            seen.setdefault(name, set()).add(ties.get((name, version), version))
    kept = set(all_names(net))
    if number_all:
        kept.difference_update(workspace_names(net))
    chosen: dict[Versioned, str] = {}

    def choose(name: str, version: int) -> str:
        version = ties.get((name, version), version)
        if not number_all and (version == 0 or len(seen.get(name, ())) <= 1):
            return name
        unique = chosen.get((name, version))
        if unique is None:
            unique = f"{name}_{version}"
            while unique in kept:
                unique += "_"
            kept.add(unique)
            chosen[name, version] = unique
        return unique

    return _rename_versions(net, {}, choose)


def number_init_net(init_net: Net) -> Net:
    """Renames the outputs of an init net for a net that was rewritten with `number_all`: they are version 0 there.

    >>> init = Net("init", (Op.of("GivenTensorFill", [], ["w"], shape=[1], values=[2.0]),), (), ("w",))
    >>> number_init_net(init).ops[0].outputs
    ('w_0',)
    """
    return rename_blobs(init_net, {name: f"{name}_0" for name in workspace_names(init_net)})


def clone_and_bind(
    net: Net, name: str, prefix: str, blob_remap: Renames | None = None
) -> tuple[Net, dict[str, str]]:
    """Copies `net` under another name, with new names for the blobs that it writes.

    Blobs that the net reads before it writes them keep their names, the others get `prefix`; `blob_remap` overrides both.
    State blobs that a recurrent network names in its arguments get the prefix too, unlike in Caffe2, where all clones share
    them.

    Returns:
        The new net and the map from every old name to its new one.

    >>> net = Net("n", (Op.of("FC", ["x", "w", "b"], ["y"]),), ("x", "w", "b"), ("y",))
    >>> clone_and_bind(net, "m", "m/", {"x": "y"})[0].ops[0].outputs
    ('m/y',)
    """
    undefined = reads(net)
    remap = {blob: prefix + blob for blob in workspace_names(net)}
    remap.update(zip(undefined, undefined))
    for blob, new in (blob_remap or {}).items():
        if blob in remap:
            remap[blob] = new
    return replace(rename_blobs(net, remap), name=name), remap
