"""Loops as users write them: `jrnn.scan` next to `jax.lax.scan`, which must never be faster.

Steps with the option `unroll`, states that are stacked for the output, substeps that stack their state, an audio compressor,
and scalar models with many parameters. Times are processor time.

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mean_times import averaged

import jrnn
from jrnn.bench.sizes import MODES
from jrnn.bench.suites import Job, SuiteOptions

OURS = ("jrnn",)
TAKES = ("cells", "modes")
NODES = 68

Step = Callable[[Mapping[str, Any], Any, Any], tuple[Any, Any]]


class Program(NamedTuple):
    """A loop, with its inputs.

    Attributes:
        step: a function of the parameters, the carry and an input.
        parameters: what gradients are with respect to, by name.
        carry: the first carry.
        xs: the inputs [T, ...].
        unroll: the option of `jax.lax.scan`.
    """

    step: Step
    parameters: dict[str, Any]
    carry: Any
    xs: Any
    unroll: int = 1


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(len(shape)).randn(*shape) * 0.3, jnp.float32)


# Spikes, with a gradient as if they were a smooth function --------------------------------------------------------------


def spike(v: Any) -> Any:
    smooth = jax.nn.sigmoid(4 * v)
    return smooth + jax.lax.stop_gradient(jnp.heaviside(v, 0.0) - smooth)


def spikes(p: Mapping[str, Any], v: Any, x: Any) -> tuple[Any, Any]:
    v = p["leak"] * v + x
    s = spike(v - 1)
    return v - s, s


def adaptive_spikes(p: Mapping[str, Any], carry: Any, x: Any) -> tuple[Any, Any]:
    v, threshold, s = carry
    v = p["leak"] * v + x - s * threshold
    threshold = 0.95 * threshold + 0.05 + 0.1 * s
    s = spike(v - threshold)
    return (v, threshold, s), (s, v)


# Networks of populations -------------------------------------------------------------------------------------------------


def slopes(p: Mapping[str, Any], state: Any) -> Any:
    """The time derivatives of rates and voltages, which are coupled by two matrices."""
    rate, voltage = state
    coupled = p["w"] @ rate
    from_voltage = p["u"] @ voltage
    of_rate = 0.3 + 2 * rate * voltage - 0.1 * rate + from_voltage
    of_voltage = voltage * voltage - 1 + 0.5 * coupled - (3 * rate) ** 2
    return jnp.array([of_rate, of_voltage])


def euler(p: Mapping[str, Any], state: Any, noise: Any) -> tuple[Any, Any]:
    state = state + 0.01 * slopes(p, state) + 0.1 * noise
    return state, state


def heun(p: Mapping[str, Any], state: Any, noise: Any) -> tuple[Any, Any]:
    now = slopes(p, state)
    later = slopes(p, state + 0.01 * now + 0.1 * noise)
    state = state + 0.005 * (now + later) + 0.1 * noise
    return state, state


def columns(p: Mapping[str, Any], state: Any) -> Any:
    """The time derivatives of six variables of a cortical column, as rows of one array."""
    y0, y1, y2, y3, y4, y5 = state
    input_rate = p["w"] @ (y1 - y2)

    def rate(v: Any) -> Any:
        return 5 / (1 + jnp.exp(0.56 * (6 - v)))

    return jnp.stack(
        [
            y3,
            y4,
            y5,
            3.25 * rate(y1 - y2) - 0.2 * y3 - 0.01 * y0,
            3.25 * (0.1 + 108 * rate(135 * y0) + input_rate) - 0.2 * y4 - 0.01 * y1,
            22 * 33 * rate(33 * y0) - 0.1 * y5 - 0.0025 * y2,
        ]
    )


def stacked(p: Mapping[str, Any], state: Any, x: Any) -> tuple[Any, Any]:
    state = state + 0.01 * columns(p, state) + x
    return state, state


def last_of_stacked(p: Mapping[str, Any], state: Any, x: Any) -> tuple[Any, Any]:
    return stacked(p, state, x)[0], None


def stacked_heun(p: Mapping[str, Any], state: Any, x: Any) -> tuple[Any, Any]:
    now = columns(p, state)
    later = columns(p, state + 0.01 * now + x)
    state = state + 0.005 * (now + later) + x
    return state, state


def substeps(p: Mapping[str, Any], state: Any, x: Any) -> tuple[Any, Any]:
    """Four short steps, each of which stacks its state."""
    for _ in range(4):
        a, b, c = state
        state = jnp.stack(
            [a + 0.01 * (b - a), b + 0.01 * (p["r"] * a - b - a * c), c + 0.01 * (a * b - c)]
        )
    return state, state + x


def substeps_of_vectors(p: Mapping[str, Any], state: Any, x: Any) -> tuple[Any, Any]:
    return substeps(p, state, x)


# Audio and hydrology: scalars, or few channels -----------------------------------------------------------------------------


def compressor(p: Mapping[str, Any], carry: Any, x: Any) -> tuple[Any, Any]:
    """The level follows with one rate when it rises, and with another when it falls; the gain follows the level."""
    level, gain = carry
    new = jnp.abs(x)
    rate = jnp.where(new > level, p["attack"], p["release"])
    level = rate * level + (1 - rate) * new
    decibels = 20 * jnp.log10(jnp.maximum(level, 1e-5))
    over = jnp.maximum(decibels - p["threshold"], 0)
    wanted = 10 ** (-over * (1 - 1 / p["ratio"]) / 20)
    gain = 0.99 * gain + 0.01 * wanted
    return (level, gain), x * gain


def hydrology(p: Mapping[str, Any], carry: Any, x: Any) -> tuple[Any, Any]:
    """Snow, soil and two reservoirs, with 12 parameters."""
    snow, soil, upper, lower = carry
    rain, warmth = x
    falls_as_snow = jax.nn.sigmoid(p["k0"] * (p["melting"] - warmth))
    melt = jnp.minimum(snow, p["melt"] * jax.nn.softplus(warmth - p["melting"]))
    snow = snow + p["correction"] * rain * falls_as_snow - melt
    water = rain * (1 - falls_as_snow) + melt
    wet = jnp.clip(soil / p["capacity"], 0.01, 1.0) ** p["beta"]
    recharge = water * wet
    evaporation = p["evaporation"] * jax.nn.softplus(warmth) * jnp.clip(soil / p["limit"], 0, 1)
    soil = jnp.maximum(soil + water - recharge - evaporation, 0.01)
    upper = upper + recharge
    percolation = jnp.minimum(p["percolation"], upper)
    quick = p["k1"] * jnp.maximum(upper - p["level"], 0) + p["k2"] * upper
    upper = upper - percolation - quick
    base = p["k3"] * lower
    lower = lower + percolation - base
    return (snow, soil, upper, lower), quick + base


def _hydrology(steps: int) -> Program:
    names = dict(
        k0=1.0, melting=0.2, melt=0.5, correction=1.1, capacity=2.0, beta=2.0, evaporation=0.05,
        limit=1.5, percolation=0.02, level=1.0, k1=0.3, k2=0.1, k3=0.05,
    )  # fmt: skip
    parameters = {name: jnp.float32(value) for name, value in names.items()}
    carry = tuple(jnp.float32(v) for v in (0.0, 1.0, 0.5, 0.5))
    return Program(hydrology, parameters, carry, (jnp.abs(draw(steps)), draw(steps)))


def _compressor(*channels: int) -> Program:
    parameters = dict(
        attack=jnp.float32(0.9),
        release=jnp.float32(0.999),
        threshold=jnp.float32(-20),
        ratio=jnp.float32(4),
    )
    carry = (jnp.zeros(channels), jnp.ones(channels))
    return Program(compressor, parameters, carry, draw(20_000, *channels))


def _network(step: Step, rows: int, steps: int, unroll: int = 1) -> Program:
    matrix = draw(NODES, NODES) / NODES
    xs = 0.1 * draw(steps, rows, NODES)
    return Program(step, {"w": matrix, "u": 2 * matrix}, 0.1 * draw(rows, NODES), xs, unroll)


def _spikes(step: Step, carry: Any, unroll: int) -> Program:
    return Program(step, {"leak": jnp.float32(0.9)}, carry, draw(96, 16, 128), unroll)


ZEROS = jnp.zeros((16, 128))
PROGRAMS: dict[str, Program] = {
    "spikes": _spikes(spikes, ZEROS, 8),
    "spikes, not unrolled": _spikes(spikes, ZEROS, 1),
    "adaptive spikes": _spikes(adaptive_spikes, (ZEROS, ZEROS + 1, ZEROS), 8),
    "euler": _network(euler, 2, 400, 10),
    "heun": _network(heun, 2, 400, 10),
    "heun, not unrolled": _network(heun, 2, 400),
    "stacked": _network(stacked, 6, 400),
    "last of stacked": _network(last_of_stacked, 6, 400),
    "stacked heun": _network(stacked_heun, 6, 400),
    "substeps": Program(substeps, {"r": jnp.float32(28)}, jnp.ones(3), draw(2_000, 3)),
    "substeps of vectors": Program(
        substeps_of_vectors, {"r": jnp.float32(28)}, jnp.ones((3, 64)), draw(500, 3, 64)
    ),
    "compressor": _compressor(),
    "compressor of two channels": _compressor(2),
    "hydrology": _hydrology(3_650),
}  # fmt: skip


def built(program: Program, scan: Callable[..., Any], mode: str) -> tuple[Any, Sequence[Any]]:
    """Returns the function of a program, or its gradient, and the arguments."""

    def forward(parameters: Any, carry: Any, xs: Any) -> Any:
        return scan(functools.partial(program.step, parameters), carry, xs, unroll=program.unroll)

    def loss(parameters: Any, carry: Any, xs: Any) -> Any:
        return sum(
            jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(forward(parameters, carry, xs))
        )

    function = forward if mode == "forward" else jax.grad(loss, (0, 2))
    return function, (program.parameters, program.carry, program.xs)


def jobs(options: SuiteOptions) -> Iterator[Job]:
    for name in options.chosen("cells", PROGRAMS):
        for mode in options.chosen("modes", MODES):
            timed = {}
            for peer, scan in (("jrnn", jrnn.scan), ("lax.scan", jax.lax.scan)):
                timed[peer] = averaged(*built(PROGRAMS[name], scan, mode))
            yield Job(name, mode, "", timed)


def summary(records: Sequence[Any]) -> str:
    """Returns the mean and the worst ratio of jrnn's time over that of `jax.lax.scan`."""
    least = {(r.cell, r.mode, r.peer): r.least for r in records}
    ratios = []
    for cell, mode, peer in least:
        if peer == "jrnn":
            ratios.append(least[cell, mode, "jrnn"] / least[cell, mode, "lax.scan"])
    return f"jrnn takes {geometric_mean(ratios):.2f} of lax.scan's time, at most {max(ratios):.2f}"
