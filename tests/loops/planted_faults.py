"""What the comparison with the loop says of derived programs of one kind: python planted_faults.py KIND

tests/loops/test_derived.py runs it with copies of jrnn that have the faults of planted_faults.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

FAULTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def main(kind):
    import chunk_layers as layers
    import jax
    import jax.numpy as jnp

    import jrnn
    from jrnn.loops.affine.chunkwise.chunked import Chunkwise
    from jrnn.loops.compile import compile_loop
    from jrnn.loops.costs import machines
    from jrnn.loops.costs.target import Target
    from jrnn.loops.costs.times import Estimate
    from jrnn.loops.derivatives.residuals import Stacks, step_with_fewer_residuals
    from jrnn.loops.ir import ScanParams, observers, tag
    from jrnn.loops.strategies import plan_chunks

    if kind == "newton":

        def turned(h, x):
            return (h := jnp.tanh(0.3 * h + 0.5 * h[::-1] + x)), h

        def turned_first(h, x):
            return (h := jnp.tanh(0.5 * h[::-1] + 0.3 * h + x)), h

        def pair(carry, x):
            return (
                jnp.tanh(carry[0] + 0.5 * carry[1]),
                jnp.sin(carry[1] - 0.1 * carry[0] + x),
            ), carry

        for step, init in (
            (turned, jnp.ones(3)),
            (turned_first, jnp.ones(3)),
            (pair, (jnp.ones(3), jnp.ones(3))),
        ):
            with observers.collected() as plans:
                jax.make_jaxpr(
                    lambda x, step=step, init=init: jrnn.scan(step, init, x, executor="newton")
                )(jnp.ones((9, 3)))
            print(*plans.notes)
    if kind in ("chunks", "residuals"):
        free = Estimate(0.0, 0)
        Chunkwise.estimate = lambda *args: free
        plan_chunks.chunks_may_pay = lambda *args: kind == "chunks"
        names = "delta_product_as_matrices gated_delta kda gla mlstm resetting linear decay_per_row_and_column momentum"
        for name in names.split():
            step = getattr(layers, name)
            xs = layers.data(40, 1, 2)
            init = layers.first_carry(step, 1, 2, 4, 4, "float32")

            def loss(xs, step=step, init=init):
                return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(jrnn.scan(step, init, xs)))

            with observers.collected() as plans:
                jax.make_jaxpr(jax.grad(loss, allow_int=True))(xs)
            print(*plans.notes)
    if kind == "residuals":
        program = jax.make_jaxpr(lambda w, h, x: (jnp.tanh(h @ w + x) * h, jnp.sin(h)))(
            *3 * [jnp.ones((3, 3))]
        )
        stacks = Stacks(0.0, machines.CPU)
        same = (
            step_with_fewer_residuals(ScanParams(program, 1, 1, None, False), stacks, None, True)
            is program
        )
        print("on random numbers" * same)
    if kind == "segments":
        mesh = jax.make_mesh((4,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec

        def elementwise(h, x):
            return (h := x["b2"] * h + x["i"]), h

        for step in (layers.delta, elementwise):
            xs = layers.data(16, 1, 2)
            init = (
                jnp.zeros((1, 2))
                if step is elementwise
                else layers.first_carry(step, 1, 2, 4, 4, "float32")
            )
            time = spec("time")
            in_time = jax.shard_map(
                lambda init, xs, step=step: jrnn.scan(step, init, xs, axis_name="time"),
                mesh=mesh, in_specs=(spec(), time), out_specs=(spec(), time),
            )  # fmt: skip
            with observers.collected() as plans:
                jax.make_jaxpr(in_time)(init, xs)
            print(*plans.notes)
    if kind == "rounds":
        step = jax.make_jaxpr(lambda h, g, x: (jnp.tanh(x) * h + 0.5 * g, 0.2 * h - 0.3 * g + x))(
            *3 * [jnp.ones(3)]
        )
        from jrnn import jaxprs

        loop = ScanParams(step, 0, 2, 128, False).loop(jaxprs.inlined(step))
        options = tag.Options("associative")
        target = Target("cuda", 1, False, machines.of("cuda"))
        print(*compile_loop(ScanParams.of_loop(loop), target, options).notes)


if __name__ == "__main__":
    main(sys.argv[1])
