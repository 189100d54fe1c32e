"""Tests of the proof of gradients: a mistake that is planted into any gradient operator is reported.

Each gradient operator of the registry is perturbed in turn: its outputs with the wrong sign, with a factor of 2, and each
two outputs of one shape swapped. The nets are those of recorded cases. The mistakes are multiplications by a matrix that is
an argument of the compiled program, so that a net is compiled once.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import read_cases

import jrnn
from jrnn.nets import registry
from jrnn.testing.gradients import Effort, Subject
from jrnn.testing.gradients.compare import agreement, by_jax, by_net

MOST = 8  # outputs of a gradient operator that are mixed
KEY = jax.random.key(0)

# Gradient operators that are not perturbed.
OLD = "no gradient maker emits it: it stands in nets that older makers wrote"
FORWARD = "is a forward operator"
NETS = "its gradient is an operator of the same type over a net, whose gradient operators are perturbed"
NOT_PERTURBED = {
    "Do": NETS,
    "If": NETS,
    "LengthsMeanGradient": OLD,
    "LengthsSumGradient": OLD,
    "NegateGradient": FORWARD,
    "SparseLengthsMeanGradient": OLD,
    "SparseLengthsSumGradient": OLD,
    "SparseLengthsWeightedSumGradient": OLD,
    "StopGradient": FORWARD,
    "While": NETS,
    "ZeroGradient": FORWARD,
}

# Swaps that change no number.
SAME = {
    "MeanGradient": {
        f"outputs {i} and {j} swapped" for i, j in ((0, 1), (0, 2), (1, 2))
    },  # all get the same share
}


pytestmark = pytest.mark.usefixtures("little_compilation")


@dataclasses.dataclass(frozen=True)
class Known:
    """A net with blobs that it reads, and the gradients that arrive at some of its blobs."""

    net: jrnn.Net
    blobs: dict
    seeds: dict


def recorded():
    for c in read_cases():
        if c.gradient is None or c.has_strings:
            continue
        finite = all(
            np.isfinite(v).all()
            for v in (*c.inputs.values(), *c.outputs.values())
            if v.dtype.kind == "f"
        )
        if finite and all(v.size for v in c.inputs.values()):
            arriving = c.gradient["seeds"]
            blobs = {n: v for n, v in c.inputs.items() if n not in arriving.values()}
            yield Known(c.forward, blobs, {y: c.inputs[dy] for y, dy in arriving.items()})


def of_recurrent_network():
    b = jrnn.NetBuilder("net")
    out = jrnn.nets.cells.BasicRNN(
        b,
        b.input("x"),
        None,
        None,
        2,
        2,
        "rnn",
        jrnn.nets.cells.BasicRNNOptions(outputs_with_grads=(0, 1)),
    )
    net = b.build()
    rng = np.random.default_rng(0)
    blobs = {
        n: rng.standard_normal(b.params[n].shape if n in b.params else (3, 2, 2))
        for n in net.external_inputs
    }
    shapes = {out.hidden_all: (3, 2, 2), out.hidden_last: (1, 2, 2)}
    return Known(net, blobs, {y: rng.standard_normal(s) for y, s in shapes.items()})


def by_gradient_operator():
    """For each operator type that gradient makers emit, the nets in whose backward pass it stands."""
    known_by_type: dict[str, list[Known]] = {}
    for known in (*recorded(), of_recurrent_network()):
        full, _ = jrnn.add_gradients(known.net, {y: y + "_arriving" for y in known.seeds})
        for type in dict.fromkeys(
            op.type for op in full.ops[len(known.net.ops) :] if op.is_gradient
        ):
            known_by_type.setdefault(type, []).append(known)
    return dict(sorted(known_by_type.items()))


KNOWN = by_gradient_operator()


def subject_of(known):
    blobs = {n: v.astype(float) if v.dtype.kind == "f" else v for n, v in known.blobs.items()}
    seeds = {y: np.asarray(v, float)[None] for y, v in known.seeds.items()}
    full, gradients = jrnn.add_gradients(known.net, {y: y + "_arriving" for y in seeds})
    wrt = tuple(n for n, v in blobs.items() if v.dtype.kind == "f" and n in gradients)
    run = jrnn.to_jax(known.net, seeds)
    function = lambda point: run({**blobs, **point}, key=KEY)  # noqa: E731
    return Subject(known.net, blobs, wrt, seeds, function, KEY)


def perturbed(definition, mix):
    """The operator, as a gradient operator, with its outputs multiplied by a matrix; those of other shapes stay apart."""

    def forward(*inputs, op, **kwargs):
        if "op" in definition.reserved:
            kwargs["op"] = op
        results = definition.forward(*inputs, **kwargs)
        if not op.is_gradient:
            return results
        outs = results if isinstance(results, tuple) else (results,)
        return (
            tuple(
                sum(
                    mix[i, j] * b
                    for j, b in enumerate(outs[:MOST])
                    if smooth(b) and b.shape == a.shape
                )
                if smooth(a)
                else a
                for i, a in enumerate(outs[:MOST])
            )
            + outs[MOST:]
        )

    return dataclasses.replace(definition, forward=forward, reserved=definition.reserved | {"op"})


def smooth(x):
    return isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating)


def mistakes(count):
    """The right matrix, and the wrong ones by name."""
    right = np.eye(MOST)
    yield "right", right
    yield "wrong sign", -right
    yield "missing factor", 2 * right
    for i, j in itertools.combinations(range(min(count, MOST)), 2):
        swapped = right.copy()
        swapped[[i, j]] = swapped[[j, i]]
        yield f"outputs {i} and {j} swapped", swapped


def agreements(type, known, monkeypatch):
    """For each mistake whether the gradients agree, and whether it changes any number at all."""
    s = subject_of(known)
    full, _ = jrnn.add_gradients(known.net, {y: y + "_arriving" for y in s.seeds})
    count = max(len(op.outputs) for op in full.ops if op.type == type and op.is_gradient)
    definition = registry.lookup(type)

    @jax.jit
    def run(mix):
        with monkeypatch.context() as m:
            m.setitem(registry._OPS, type, perturbed(definition, mix))
            return by_jax(s), by_net(s)

    nowhere, right = np.zeros(0, np.int64), None
    for name, mix in mistakes(count):
        mine, theirs = jax.device_get(run(mix))
        right = theirs if right is None else right
        changes = any((right[n] != theirs[n]).any() for n in s.wrt)
        compared = [agreement(s, n, mine[n], theirs[n], nowhere, np.zeros((1, 0))) for n in s.wrt]
        yield name, all(Effort().agrees(b) for b in compared), changes


def tried(type, monkeypatch):
    """The mistakes that are reported, and those that change no number in any of the nets that are tried."""
    told, seen = set(), set()
    for known in KNOWN[type]:
        for name, agrees, changes in agreements(type, known, monkeypatch):
            if name == "right":
                assert agrees, f"{type} disagrees without a mistake in {known.net.ops[0]}"
                continue
            seen.add(name)
            if changes:
                assert not agrees, f"{name} of {type} is not told in {known.net.ops[0]}"
                told.add(name)
        if seen == told:
            break
    return told, seen - told


@pytest.mark.exhaustive(
    "InstanceNormGradient",
    "LengthsIndicesInGradientSumGradient",
    "LpPoolGradient",
    "MaxPoolGradient",
    "SortedSegmentRangeSumGradient",
    "TopKGradient",
)
@pytest.mark.grid(every=8)
@pytest.mark.parametrize("type", [t for t in KNOWN if t not in NOT_PERTURBED])
def test_a_planted_mistake_is_told(type, monkeypatch, x64):
    told, unseen = tried(type, monkeypatch)
    assert {"wrong sign", "missing factor"} <= told
    assert unseen == SAME.get(type, set())


def test_every_gradient_operator_is_perturbed_or_excused():
    named = {d.type for d in registry.registered() if d.type.endswith("Gradient")}
    assert not named - set(KNOWN) - set(NOT_PERTURBED)
    assert not named & set(NOT_PERTURBED) & set(KNOWN)
    assert {*NOT_PERTURBED, *SAME} <= {d.type for d in registry.registered()}
