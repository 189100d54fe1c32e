"""What cannot become a net raises an error that says what, where and the fix; a wrong export is detected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.experimental import io_callback
from zoo import normal

import jrnn
from jrnn.convert import Package, from_factory
from jrnn.convert.emitter import RULES
from jrnn.errors import ConversionError

pytestmark = pytest.mark.usefixtures("little_compilation")

X = normal(3, 3)


def refused(fn, *args, **kwargs) -> str:
    with pytest.raises(ConversionError) as e:
        jrnn.from_jax(fn, *args, **kwargs)
    return str(e.value)


def test_every_primitive_without_a_rule_is_listed_with_its_line():
    def fn(x):
        return lax.nextafter(x, 2 * x) + lax.bessel_i0e(x)

    text = refused(fn, X)
    assert "2 reasons" in text
    assert "nextafter has no rule (test_conversion_refusals.py:" in text
    assert "bessel_i0e has no rule (test_conversion_refusals.py:" in text


def test_reasons_within_a_step_are_listed():
    text = refused(
        lambda x: lax.scan(lambda c, row: (c + lax.digamma(row), lax.lgamma(row)), x[0], x), X
    )
    assert "digamma has no rule" in text
    assert "lgamma has no rule" in text


def test_effects():
    def fn(x):
        jax.debug.print("{}", x)
        return x

    assert "has effects" in refused(fn, X)


def test_callbacks():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    text = refused(lambda x: jax.pure_callback(lambda v: v, shape, x), X)
    assert "has effects (pure_callback, test_conversion_refusals.py:" in text
    assert "has effects (IO" in refused(lambda x: io_callback(lambda v: v, shape, x), X)


def test_random_numbers():
    text = refused(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), X)
    assert "draws random numbers (test_conversion_refusals.py:" in text


def test_a_module_in_training():
    module = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    assert "module.eval()" in refused(module, X)
    module.eval()
    assert [op.type for op in jrnn.from_jax(module, X).predict_net.ops] == ["FCTransposed"]


def test_a_module_without_its_variables():
    assert "pass them as `params`" in refused(linen.Dense(3), X)
    assert "leave `params` out" in refused(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), X, params={})


def test_unused_randomness_is_no_matter():
    def fn(x):
        jax.random.normal(jax.random.key(0), x.shape)
        return x * 2

    assert [op.type for op in jrnn.from_jax(fn, X).predict_net.ops][-1] == "Mul"


def test_shapes_that_are_not_numbers():
    (n,) = jax.export.symbolic_shape("n")
    assert "has a dimension n" in refused(
        lambda x: x * 2, jax.ShapeDtypeStruct((n, 3), jnp.float32)
    )


def test_shapes_that_depend_on_values():
    assert "known only when it runs" in refused(lambda x: x[x > 0], X)
    assert "known only when it runs" in refused(lambda x: x if x.sum() > 0 else -x, X)
    assert "known only when it runs" in refused(jnp.unique, X)


@pytest.mark.parametrize("given", ["mode", None, object()])
def test_arguments_that_are_no_arrays(given):
    if given is None:
        assert jrnn.from_jax(lambda x, y: x * 2, X, None).input_names == ("x",)  # an empty pytree
    else:
        assert "argument 'y' is a " in refused(lambda x, y: x, X, given)


def test_types():
    assert "float16" in refused(lambda x: x * 2, X.astype(jnp.float16))
    text = refused(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), X)
    assert "makes bfloat16" in text
    assert "fft of complex64[3,3] has no rule for complex numbers" in refused(
        lambda x: jnp.fft.fft(x).real, X
    )


def test_no_output():
    assert "returns no array" in refused(lambda x: None, X)


def test_what_is_no_function():
    assert "takes a function" in refused(3, X)


def test_what_caffe2_cannot_do_at_equal_indices():
    text = refused(lambda x, i: x.at[i].mul(2.0), X, jnp.array([0, 0]))
    assert "scatter-mul at indices that may be equal" in text
    assert "unique_indices=True" in text


def test_rounding_to_fewer_bits():
    assert "mantissa" in refused(lambda x: lax.reduce_precision(x, 8, 7), X)


def test_a_wrong_export_is_found_out(monkeypatch):
    def wrong(e, node, x):
        return e.op("Cos", [e.blob(x)], x.shape, x.dtype)

    monkeypatch.setitem(RULES, "sin", wrong)
    text = refused(lambda x: jnp.exp(jnp.sin(x * 2)) + 1, X)
    assert "the nets of 'lambda' compute other numbers" in text
    assert (
        "the first blob that differs is 'Cos', made from sin (test_conversion_refusals.py:" in text
    )
    assert "Cos -> 'Cos'" in text


@pytest.mark.exhaustive
def test_loops_that_do_not_end_on_random_numbers():
    """The nets are verified on the caller's numbers only."""

    def count(x):
        return jax.lax.while_loop(lambda s: jnp.sum(s) != 0, lambda s: s - 1, x)

    def within(x):
        return jax.lax.scan(
            lambda c, _: (jax.lax.cond(c[0] > 0, count, jnp.negative, c), c[0]), x, None, length=2
        )

    for fn in (count, within):
        package = jrnn.from_jax(fn, jnp.array([3.0]))
        assert package.to_jax()({"x": jnp.array([2.0])})[
            "output" if fn is count else "output/0"
        ].tolist() == [0.0]
        with pytest.raises(
            ConversionError, match="a while loop takes more than 10000 steps on random numbers"
        ):
            jrnn.from_jax(fn, jax.ShapeDtypeStruct((1,), jnp.float32))
    halves = jrnn.from_jax(
        lambda x: jax.lax.while_loop(lambda s: s.sum() > 1, lambda s: s / 2, x), jnp.array([8.0])
    )
    assert halves.predict_net.ops


def test_packages_that_are_not_there(tmp_path):
    with pytest.raises(ConversionError, match=r"has no init_net\.pb"):
        jrnn.convert.Package.load(tmp_path)
    with pytest.raises(ConversionError, match=r"MODULE:FUNCTION"):
        from_factory("nothing")
    with pytest.raises(ConversionError, match=r"install the module"):
        from_factory("no_such_module_here:make")


def test_factories(tmp_path):
    path = tmp_path / "models_to_convert.py"
    path.write_text(
        "import jax.numpy as jnp\n"
        "def make():\n    return lambda p, x: x @ p['w'], (jnp.ones((2, 3)),), {'w': jnp.ones((3, 4))}\n"
        "def wrong():\n    return 3\n"
    )
    package = from_factory(f"{path}:make")
    assert package.weight_names == ("w",)
    package.save(tmp_path / "out")
    assert Package.load(tmp_path / "out") == package
    with pytest.raises(ConversionError, match=r"returns a int; it must return \(fn, args\)"):
        from_factory(f"{path}:wrong")
    with pytest.raises(ConversionError, match=r"did you mean 'make'"):
        from_factory(f"{path}:mak")


def test_names():
    w = normal(3, 4)
    package = jrnn.from_jax(lambda p, x, carry: (x @ w + p["layer"][0], carry["h"] * 2), X, {"h": X},
                            params={"layer": [normal(4)]})  # fmt: skip
    assert package.input_names == ("x", "carry/h")
    assert set(package.weight_names) == {"w", "layer/0"}
    assert package.output_names == ("output/0", "output/1")


def test_weights_can_be_replaced():
    package = jrnn.from_jax(lambda p, x: x * p["scale"], X, params={"scale": jnp.float32(2)})
    run = package.to_jax()
    np.testing.assert_array_equal(run({"x": X})["output"], X * 2)
    np.testing.assert_array_equal(run({"x": X}, {"scale": jnp.float32(3)})["output"], X * 3)


@pytest.mark.exhaustive
def test_generated_backward_net_of_an_export():
    params = {"w": normal(4, 3), "u": normal(4, 4) * 0.3, "b": normal(4)}

    def fn(params, x):
        def step(h, x):
            h = jnp.tanh(x @ params["w"].T + h @ params["u"].T + params["b"])
            return h, h

        return jnp.mean(jnp.square(lax.scan(step, jnp.zeros((2, 4)), x)[1]))

    x = normal(5, 2, 3)
    package = jrnn.from_jax(fn, x, params=params)
    net, gradients = jrnn.add_gradients(package.predict_net, ["output"])
    blobs = jrnn.run_net(net, {**package.weights(), "x": x})
    for name, want in jax.grad(fn)(params, x).items():
        np.testing.assert_allclose(blobs[gradients[name]], want, rtol=1e-4, atol=1e-6)
