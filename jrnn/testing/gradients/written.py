"""The gradient operators that a training net holds itself, which `add_gradients` or Caffe2 wrote into the file.

They are run one by one and compared with the backward net that is generated here, whose names and order are the same
(Caffe2's). So the first operator that writes another value, from inputs that were right, is the one at fault. Where a
file has another number of operators, blobs of the same name are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrnn.errors import JrnnError, describe_op
from jrnn.nets.autodiff import SUM_TAG, backward_pass
from jrnn.nets.blobs import dense
from jrnn.nets.gradient_maker import Gradient, names_of, renamed
from jrnn.nets.ir import Net, Op, Renames
from jrnn.nets.lowering import Context, LoweringOptions, execute
from jrnn.nets.schedule import schedule
from jrnn.testing.gradients.report import Blobs, WrittenFault

_NET = "written"  # of one operator that is run
SEED = "_autogen_grad"  # the end of the name of a loss's gradient


def seeds_in(net: Net) -> dict[str, int]:
    """The blobs whose gradient a net begins with -> the position of the operator that makes this gradient."""
    written: set[str] = set()
    seeds = {}
    for k, op in enumerate(net.ops):
        for name in op.outputs:
            loss = name.removesuffix(SEED)
            if loss != name and loss in written:
                seeds.setdefault(loss, k)
        written.update(op.outputs)
    return seeds


def backward_part(net: Net, losses: Iterable[str]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The forward operators of a training net, and its gradient operators: from the first seed of `losses` to the last one.

    What follows, such as the updates of weights, is no part of the gradient.
    """
    seeds = seeds_in(net)
    places = []
    for y in losses:
        if y in seeds:
            places.append(seeds[y])
    if not places:
        return net.ops, ()
    first = min(places)
    while first - 1 in seeds.values():  # seeds of other losses
        first -= 1
    last = max(k for k, op in enumerate(net.ops) if k in places or _is_gradient(op))
    return net.ops[:first], net.ops[first : last + 1]


def _is_gradient(op: Op) -> bool:
    tags = () if op.device_option is None else op.device_option.extra_info
    return op.is_gradient or op.type.endswith("Gradient") or SUM_TAG in tags


@dataclass(frozen=True)
class WrittenGradients:
    """What the gradient operators of a file compute.

    Attributes:
        gradients: blob -> its dense gradient, where the file has one.
        fault: the first operator that is wrong, or None.
    """

    gradients: Mapping[str, np.ndarray]
    fault: WrittenFault | None


@dataclass(frozen=True)
class _Run:
    """Operators that were run one by one.

    Attributes:
        ops: the operators.
        values: of the outputs of each, or why it could not be run.
        last: the last value of each blob.
    """

    ops: tuple[Op, ...]
    values: tuple[tuple[Any, ...] | str, ...]
    last: Blobs

    def of(self, gradient: Gradient | None, like: Any) -> np.ndarray | None:
        """A gradient as an array, or None without one."""
        names = names_of(gradient)
        if not names or not all(n in self.last for n in names):
            return None
        assert gradient is not None
        return np.asarray(dense(gradient, self.last, like))


def _run(ops: Sequence[Op], blobs: Blobs, key: Any, zero: Iterable[str] = ()) -> _Run:
    """Runs operators one by one; an operator that fails writes nothing. Outputs in `zero` are set to zeros."""
    context = Context(LoweringOptions(wide=True), key, eager=True)
    env = dict(blobs)
    values: list[tuple[Any, ...] | str] = []
    for op in ops:
        try:
            env = execute(schedule(Net(_NET, (op,))), env, context)
        except JrnnError as e:
            values.append(str(e).rpartition(f" in net {_NET!r}: ")[2])
            for name in op.outputs:
                env.pop(name, None)
            continue
        for name in set(op.outputs).intersection(zero):
            env[name] = np.zeros_like(env[name])
        values.append(tuple(env[n] for n in op.outputs))
    return _Run(tuple(ops), tuple(values), env)


def written_gradients(
    net: Net,
    ops: tuple[Op, ...],
    losses: Sequence[str],
    blobs: Blobs,
    key: Any,
    tolerance: float,
) -> WrittenGradients:
    """Runs the gradient operators of a training net and compares them with the generated ones.

    Args:
        net: the forward operators.
        ops: the gradient operators, as `backward_part` returns them.
        losses: the blobs that are differentiated; gradients of others that the file differentiates are made zero.
        blobs: what the net reads, in float64.
        key: for random operators.
        tolerance: of the difference of two gradients, relative to the largest element if that is above 1.
    """
    forward = _run(net.ops, blobs, key).last
    generated = backward_pass(
        net.ops, dict.fromkeys(losses), net.name, external=net.external_inputs
    )
    reference = _run(generated.ops, _run(generated.forward, blobs, key).last, key)
    others = []
    for y in seeds_in(replace(net, ops=net.ops + ops)):
        if y not in losses:
            others.append(y + SEED)
    own = _run(ops, forward, key, zero=others)
    pairs = _aligned(own.ops, reference.ops)
    names = _names_in_file(own.ops, reference.ops, pairs)
    found = {}
    wrong = False
    for name, gradient in generated.gradients.items():
        like = forward.get(name)
        computed = own.of(renamed(gradient, names), like)
        right = reference.of(gradient, like)
        if computed is None:
            continue
        found[name] = computed
        wrong = wrong or right is None or _error(right, computed) > tolerance
    failed = any(isinstance(v, str) and _is_gradient(op) for op, v in zip(ops, own.values))
    fault = None
    if wrong or failed:
        fault = _first_fault(own, reference, pairs, len(net.ops), net.name, tolerance)
    return WrittenGradients(found, fault)


Place = tuple[int, int]  # of an operator, and of one of its outputs


def _aligned(ops: Sequence[Op], reference: Sequence[Op]) -> dict[Place, Place]:
    """Which output of a reference's operator each output of the operators corresponds to: by name, or else by position.

    A blob that is written several times is paired from its last value on.
    """
    of_reference = _writes(reference)
    pairs: dict[Place, Place] = {}
    for name, places in _writes(ops).items():
        pairs.update(zip(places, of_reference.get(name, ())))
    if len(ops) != len(reference):
        return pairs
    taken = set(pairs.values())
    for k, op in enumerate(ops):
        for j in range(len(op.outputs)):
            is_free = (k, j) not in taken and j < len(reference[k].outputs)
            if (k, j) not in pairs and is_free:
                pairs[k, j] = (k, j)
    return pairs


def _writes(ops: Sequence[Op]) -> dict[str, list[Place]]:
    """Where each blob is written, the last time first."""
    writes: dict[str, list[Place]] = defaultdict(list)
    for k, op in reversed(list(enumerate(ops))):
        for j, name in enumerate(op.outputs):
            writes[name].append((k, j))
    return writes


def _names_in_file(
    ops: Sequence[Op], reference: Sequence[Op], pairs: Mapping[Place, Place]
) -> dict[str, str]:
    """What the blobs of the reference are called in the file, by their last values."""
    names = {}
    for (k, j), (of, output) in sorted(pairs.items()):
        names[reference[of].outputs[output]] = ops[k].outputs[j]
    return names


def _error(right: Any, value: Any) -> float:
    """The largest difference, relative to the largest element if that is above 1; infinite for another shape or a NaN."""
    a = np.asarray(right)
    b = np.asarray(value)
    if a.shape != b.shape:
        return np.inf
    scale = max(1.0, float(np.max(np.abs(a), initial=0.0)))
    error = float(np.max(np.abs(a - b), initial=0.0)) / scale
    return np.inf if np.isnan(error) else error


def _first_fault(
    own: _Run,
    reference: _Run,
    pairs: Mapping[Place, Place],
    offset: int,
    net_name: str,
    tolerance: float,
) -> WrittenFault | None:
    """The first operator that fails, or that writes another value than its counterpart in the reference."""
    for k, op in enumerate(own.ops):
        values = own.values[k]
        where = describe_op(offset + k, op.type, op.outputs, net_name)
        if isinstance(values, str):
            if _is_gradient(op):
                return WrittenFault(where, op.type, op.outputs[0], (), None, values, position=k)
            continue
        for j, name in enumerate(op.outputs):
            place = pairs.get((k, j))
            if place is None:
                continue
            right = reference.values[place[0]]
            if isinstance(right, str) or not _is_number(values[j]):
                continue
            if _error(right[place[1]], values[j]) > tolerance:
                other = reference.ops[place[0]]
                fault = _fault_of(where, op, name, values[j], right[place[1]], other)
                return replace(fault, position=k)
    return None


def _is_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "fiu"


def _fault_of(where: str, op: Op, name: str, value: Any, right: Any, other: Op) -> WrittenFault:
    """The fault of an operator that writes a wrong value, with the element that is farthest off."""
    expected = ""
    if other.type != op.type:
        expected = f"the generated backward net has a {other.type} there"
    if np.shape(value) != np.shape(right):
        shapes = f"it has shape {list(np.shape(value))}, not {list(np.shape(right))}"
        return WrittenFault(where, op.type, name, (), None, expected or shapes)
    off = np.nan_to_num(np.abs(np.asarray(value) - np.asarray(right)), nan=np.inf)
    index = tuple(map(int, np.unravel_index(int(np.argmax(off)), off.shape)))
    values = (float(np.asarray(value)[index]), float(np.asarray(right)[index]))
    return WrittenFault(where, op.type, name, index, values, expected)


def fault_in_backward_step(
    step: Net,
    backward: Net,
    seeds: Renames,
    blobs: Blobs,
    key: Any,
    tolerance: float,
) -> WrittenFault | None:
    """The first wrong operator of a backward step net, compared with the one generated from the step net.

    Args:
        step, backward: the two nets.
        seeds: outputs of the step -> the blobs of their gradients, which the backward step net reads.
        blobs: the values of one step, with those gradients.
        key: for random operators.
        tolerance: as in `written_gradients`.
    """
    forward = _run(step.ops, blobs, key).last
    generated = backward_pass(step.ops, seeds, step.name, external=blobs)
    reference = _run(generated.ops, _run(generated.forward, blobs, key).last, key)
    own = _run(backward.ops, forward, key)
    pairs = _aligned(own.ops, reference.ops)
    return _first_fault(own, reference, pairs, 0, backward.name, tolerance)
