"""The meaning of names inside an operator's sub-nets, and the arguments that hold names of blobs.

A sub-net runs in one of three kinds of workspace, which follows from the operator's arguments:

- SHARED: the operator's own workspace. Names mean the same as outside (the branches of If, the nets of While).
- STEP: a workspace of its own that can read names of the outer one (the step nets of recurrent networks, which have
  links). Blobs that a step net writes stay inside, and its operator fills some names itself.
- CLOSED: a workspace of its own in which only bound names refer to outer blobs (Do, which has bindings).

Only this module knows these arguments; liveness, renaming and cloning use it.
"""

import enum
from collections.abc import Iterable, Iterator
from itertools import chain

from jrnn.nets.ir import NameSet, Net, Op, nets_of, written_by

# Arguments with names of outer blobs. If an operator reads one version of a blob and writes another, the first kind refers
# to the version that it reads, and the second to the one that it writes.
READ_NAMES = ("link_external", "alias_src", "recurrent_states", "recurrent_inputs")
WRITTEN_NAMES = ("alias_dst", "backward_alias_dst")
# Gradients of outer blobs, named after the blob. The argument `<gradient>.rename` gives a gradient another name.
GRADIENT_NAMES = ("backward_link_external",)
GRADIENT_SUFFIX = "_grad"
RENAME_SUFFIX = ".rename"

# Arguments with names of blobs inside the sub-nets: those that the operator fills, and the others.
LINKS = ("link_internal", "backward_link_internal")
TIMESTEP = "timestep"
BINDINGS = "inner_blobs"
INNER_NAMES = ("param_grads", "recompute_blobs_on_backward")


class Workspace(enum.Enum):
    SHARED = "shared"
    STEP = "step"
    CLOSED = "closed"


def workspace_of(op: Op) -> Workspace:
    """Returns the kind of workspace that the sub-nets of `op` run in.

    >>> workspace_of(Op.of("While", ["go"], ["go"], loop_net=Net())).value
    'shared'
    """
    names = {a.name for a in op.args}
    if BINDINGS in names:
        return Workspace.CLOSED
    return Workspace.STEP if names.intersection(LINKS) else Workspace.SHARED


def has_sub_nets(op: Op) -> bool:
    """Returns whether an argument of `op` holds a net."""
    return bool(nets_of(op))


def keeps_outputs(op: Op) -> bool:
    """Returns whether an output of `op` may keep its old value: a branch that is not taken, a loop of no rounds."""
    return has_sub_nets(op) and workspace_of(op) is not Workspace.STEP


def bound_names(op: Op) -> list[str]:
    """Returns the names that `op` fills in its sub-nets' workspace before they run."""
    bound: list[str] = []
    for argument in (*LINKS, BINDINGS):
        bound += op.names(argument)
    if workspace_of(op) is Workspace.STEP:
        bound += op.names(TIMESTEP) or (TIMESTEP,)
    return bound


def workspace_outputs(op: Op) -> list[str]:
    """Returns the outputs of an operator with step nets through which other operators read its workspaces."""
    results = set(op.names("alias_dst"))
    return [name for name in op.outputs if name not in results]


def outer_names(op: Op) -> Iterator[str]:
    """Yields the outer blobs that arguments of `op` name."""
    for arg in op.args:
        if arg.name in (*READ_NAMES, *WRITTEN_NAMES, *GRADIENT_NAMES):
            yield from arg.names()
        elif arg.name.endswith(RENAME_SUFFIX):
            yield arg.name.removesuffix(RENAME_SUFFIX)
            yield from arg.names()


def step_reads(op: Op) -> list[str]:
    """Returns the names in the step nets of `op` that refer to outer blobs, each once, in order.

    The operator fills the other names, or a step net writes them before it reads them.
    """
    read: NameSet = {}
    local = set(bound_names(op))
    for net in nets_of(op):
        names = reads(net)
        local.update(written_by(net.ops).keys() - names)
        read.update(dict.fromkeys((*names, *net.external_inputs)))
    return [name for name in read if name not in local]


def free_names(op: Op) -> list[str]:
    """Returns the outer blobs that the sub-nets of `op` read without a declaration, each once, in order.

    A name is not free if the sub-net writes it earlier, or the operator fills it or lists it as an input. In a step net it
    is not free either if the net declares it as an external input, or another step net of the operator writes it. A name
    that is free in one sub-net may be local to another (a loop body reads a blob that the condition wrote), so it need not
    exist outside.

    >>> step = Net("step", (Op.of("Mul", ["h", "scale"], ["h_new"]),), ("h",))
    >>> free_names(Op.of("RecurrentNetwork", ["x", "h0"], ["h_all"], step_net=step, link_internal=["h", "h_new"]))
    ['scale']
    """
    nets = nets_of(op)
    if not nets:
        return []
    kind = workspace_of(op)
    if kind is Workspace.CLOSED:
        return []

    known = set(op.inputs)
    read: Iterable[str]
    if kind is Workspace.STEP:
        read = step_reads(op)
        for net in nets:
            known.update(net.external_inputs)
    else:
        read = dict.fromkeys(chain.from_iterable(map(reads, nets)))
    return [name for name in read if name not in known]


def all_reads(op: Op) -> list[str]:
    """Returns the blobs that an operator and its sub-nets read."""
    return [*op.inputs, *free_names(op)]


def reads(net: Net) -> list[str]:
    """Returns the blobs that operators of `net` read before one of them writes it, each once, in order."""
    written: set[str] = set()
    read: NameSet = {}
    for op in net.ops:
        for name in all_reads(op):
            if name not in written:
                read[name] = None
        written.update(op.outputs)
    return list(read)


def all_names(net: Net) -> Iterator[str]:
    """Yields every name of a blob in `net`, its arguments and its sub-nets, with repetitions."""
    yield from net.external_inputs
    yield from net.external_outputs
    for op in net.ops:
        yield from op.inputs
        yield from op.outputs
        yield from bound_names(op)
        yield from outer_names(op)
        for sub_net in nets_of(op):
            yield from all_names(sub_net)


def workspace_names(net: Net) -> list[str]:
    """Returns every name of a blob in the workspace that `net` runs in, each once, in order of appearance."""
    blobs = list(net.external_inputs)
    for op in net.ops:
        blobs += all_reads(op)
        if workspace_of(op) is Workspace.SHARED:
            for sub_net in nets_of(op):
                blobs += workspace_names(sub_net)
        blobs += (*op.outputs, *outer_names(op))
    return list(dict.fromkeys((*blobs, *net.external_outputs)))


def binds(op: Op, read: str, written: str) -> bool:
    """Whether `op` is or contains a Do that reads one blob and writes the other, so that their names must differ."""
    kind = workspace_of(op)
    if kind is Workspace.CLOSED:
        return read in op.inputs and written in op.outputs
    if kind is Workspace.SHARED:
        for net in nets_of(op):
            if any(binds(inner, read, written) for inner in net.ops):
                return True
    return False
