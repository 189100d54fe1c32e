"""Complex numbers as pairs: functions, products, loops and branches compute what they do with complex arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jrnn
from jrnn.errors import ConversionError
from jrnn.jaxprs.real_parts import has_complex, real_jaxpr


def elementwise(x, y):
    z, w = lax.complex(x, y), lax.complex(y - 1, x)
    where = jnp.where(x > 0, z, w)
    return (
        z + w,
        z - w,
        z * w,
        z / w,
        w / (z + 3),
        jnp.exp(z),
        jnp.log(w),
        jnp.abs(z),
        z**3,
        w**-2,
        -z,
        jnp.conj(w),
        where,
    )


def shaped(x, y):
    z, m = lax.complex(x, y), jnp.asarray(np.array([[1 + 2j, 0.5], [-1j, 2]], np.complex128))
    joined = jnp.concatenate([z, z[::-1] * 2j], axis=0).reshape(2, -1)
    taken = jnp.cumsum(joined, axis=1)[:, jnp.array([0, 2, 1])]
    stopped = checkpoint_name(lax.stop_gradient(z), "stopped")
    return (
        z @ m,
        joined.T,
        taken,
        jnp.sum(z, axis=0),
        jnp.pad(z, ((0, 1), (1, 0))),
        z == z,
        z != joined[:, :1],
        stopped,
    )


def loops(x, y):
    z = lax.complex(x, y)
    last, ys = lax.scan(lambda c, v: (0.5j * c + v, c * v), jnp.zeros(2, z.dtype), z, reverse=True)
    n, grown = lax.while_loop(
        lambda s: jnp.abs(s[1]).sum() < 9, lambda s: (s[0] + 1, s[1] * (1 + 1j)), (0, z[0])
    )
    chosen = lax.cond(n > 2, lambda v: v * 1j, lambda v: v + 1, grown)
    return last, ys, n, grown, chosen, jax.jit(jnp.conj)(z), x + 1


def gradients(x, y):
    """JAX transposes real and imaginary parts to complex numbers of which one part is a scalar zero."""

    def loss(x, y):
        z = lax.complex(x, y)
        _, ys = lax.scan(lambda c, v: (0.5j * c + v, jnp.exp(c) * v), jnp.zeros(2, z.dtype), z)
        return (
            jnp.sum(ys.real) - jnp.sum(jnp.sin(ys.imag)) + jnp.sum(jnp.abs(jnp.conj(z) / (ys + 3)))
        )

    return jax.grad(loss, (0, 1))(x, y)


@pytest.mark.parametrize("fn", [elementwise, shaped, loops, gradients])
def test_parts_are_those_of_the_complex_numbers(fn, x64):
    rng = np.random.default_rng(0)
    args = rng.standard_normal((2, 2, 2))

    def parts(*args):
        return [
            a
            for out in fn(*args)
            for a in ([out.real, out.imag] if jnp.iscomplexobj(out) else [out])
        ]

    closed = jax.make_jaxpr(parts)(*args)
    actual = real_jaxpr(closed, "f")
    assert has_complex(closed.jaxpr) and not has_complex(actual.jaxpr)
    for ours, theirs in zip(
        jax.jit(jax.extend.core.jaxpr_as_fun(actual))(*args), jax.jit(parts)(*args), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-13)


def test_quotients_and_sizes_do_not_overflow():
    def f(x):
        z = lax.complex(x, 2 * x)
        return (lax.complex(x, x) / z).real, jnp.abs(z)

    large = jnp.float32(1e38)
    quotient, size = jax.extend.core.jaxpr_as_fun(real_jaxpr(jax.make_jaxpr(f)(large), "f"))(large)
    np.testing.assert_allclose([quotient, size], [0.6, 5**0.5 * 1e38], rtol=1e-6)


def test_a_net_computes_with_the_parts():
    def spiral(x):
        return lax.complex(x, jnp.ones_like(x)) * 2j

    package = jrnn.from_jax(spiral, jnp.ones((2, 3)))
    assert package.output_names == ("output/imag", "output/real")
    inputs = {**package.weights(), "x": np.full((2, 3), 4.0, np.float32)}
    out = jrnn.run_net(package.predict_net, inputs)
    np.testing.assert_array_equal(out["output/real"], np.full((2, 3), -2.0))
    np.testing.assert_array_equal(out["output/imag"], np.full((2, 3), 8.0))


def test_what_has_no_rule_is_named_with_its_line():
    with pytest.raises(
        ConversionError,
        match=r"f: tan of complex64\[2\] has no rule for complex numbers \(.*test_real_parts.py",
    ):
        jrnn.from_jax(lambda x: jnp.tan(lax.complex(x, x)).real, jnp.ones(2), name="f")
    with pytest.raises(
        ConversionError, match=r"argument 'z' is complex64.*join them inside: jax.lax.complex"
    ):
        jrnn.from_jax(lambda z: z.real, jnp.ones(2, jnp.complex64))
