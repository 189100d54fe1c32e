"""Numbers and truth values of numpy and JAX do what Python's own do, wherever a public function takes one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.nets import cells

XS = jnp.arange(6.0).reshape(6, 1)


def scanned(**options):
    def loss(xs):
        return jrnn.scan(lambda c, x: (jnp.tanh(c + x), c), jnp.zeros(1), xs, **options)[1].sum()

    return np.asarray(jax.grad(loss)(XS)).tolist()


def layer(make):
    b = jrnn.NetBuilder("net")
    make(b, b.input("x"), b.input("lengths"))
    return b.build()


def filled(shape, value, trips):
    net = jrnn.Net("n", (jrnn.nets.Op.of("ConstantFill", [], ["y"], shape=shape, value=value),))
    return jrnn.run_net(net, {}, max_iterations=trips)["y"].tolist()


# name -> what a call gives, for numbers i(2), f(0.5) and a truth value t
CALLS = {
    "scan length": lambda i, f, t: jrnn.scan(lambda c, _: (c + 1, c), 0.0, None, length=i(4))[
        1
    ].tolist(),
    "scan reverse": lambda i, f, t: scanned(reverse=t),
    "scan unroll": lambda i, f, t: scanned(unroll=i(2)),
    "scan recompute": lambda i, f, t: scanned(recompute=i(2)),
    "scan strict": lambda i, f, t: scanned(strict=t),
    "Op.of": lambda i, f, t: jrnn.nets.Op.of(
        "T", axis=i(2), scale=f(0.5), flag=t, dims=[i(1), i(2)], pads=[f(0.5)]
    ),
    "run_net": lambda i, f, t: filled([i(2)], f(0.5), i(4)),
    "NetBuilder.param": lambda i, f, t: layer(
        lambda b, x, lengths: b.param("w", [i(2), i(3)], "ConstantFill", value=f(0.5))
    ),
    "layer": lambda i, f, t: layer(
        lambda b, x, lengths: cells.LSTM(
            b,
            x,
            lengths,
            None,
            i(3),
            i(4),
            "s",
            cells.LSTMOptions(forget_bias=f(0.5), drop_states=t),
        )
    ),
    "layers": lambda i, f, t: layer(
        lambda b, x, lengths: cells.LSTM(
            b,
            x,
            lengths,
            None,
            i(3),
            [i(4), i(5)],
            "s",
            cells.LSTMOptions(outputs_with_grads=(i(0), (i(0), i(2))), memory_optimization=t),
        )
    ),
    "unrolled layer": lambda i, f, t: layer(
        lambda b, x, lengths: cells.GRU(
            b,
            x,
            None,
            None,
            i(3),
            i(4),
            "s",
            cells.GRUOptions(unroll_steps=i(2), linear_before_reset=t),
        )
    ),
}
KINDS = {
    "numpy": (np.int32, np.float32, np.bool_(True)),
    "numpy 64": (np.int64, np.float64, np.bool_(True)),
    "numpy array": (np.asarray, np.asarray, np.asarray(True)),
    "jax": (jnp.asarray, jnp.asarray, jnp.asarray(True)),
}


@pytest.mark.exhaustive("scan reverse", "scan unroll", "scan recompute", "scan strict")
@pytest.mark.parametrize("name", CALLS)
def test_scalars_are_alike(name):
    wanted = CALLS[name](int, float, True)
    for kind, actual in KINDS.items():
        assert CALLS[name](*actual) == wanted, kind
