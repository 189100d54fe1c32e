"""Every family inside of `jax.shard_map` with its default `check_vma=True`: the state varies as the tokens do."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrnn import models

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
EXACT_GELU = ("bamba_1", "zamba2_0", "zamba2_1")
TOKENS = np.random.RandomState(0).randint(0, 10, (4, 9))
LENGTHS, RESETS = np.array([9, 0, 4, 3]), np.arange(9)[None].repeat(4, 0) == 3
MESH = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
pytestmark = pytest.mark.usefixtures("little_optimization")


def loss(model, tokens, lengths, resets):
    leaves = jax.tree.leaves(model(tokens, lengths=lengths, resets=resets))
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))


def inside(model, tokens, lengths, resets):
    part = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "batch"),
        mesh=MESH,
        in_specs=(P(), *[P("batch")] * 3),
        out_specs=P(),
    )
    return part(model, tokens, lengths, resets)


def erf_has_a_gradient_here():
    """Whether this version of JAX differentiates `erf` inside of `jax.shard_map`; 0.12.0 does not."""
    part = jax.shard_map(jax.lax.erf, mesh=MESH, in_specs=P("batch"), out_specs=P("batch"))
    try:
        jax.eval_shape(jax.grad(lambda x: jnp.sum(part(x))), jnp.ones(1))
    except ValueError:
        return False
    return True


@pytest.mark.sample("falcon_h1_0", "kimi_linear_0", "mamba_0", "qwen3_next_0", "zamba2_1")
@pytest.mark.parametrize(
    "name", sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
)
def test_types_agree(name):
    """Values, gradients and generation are traced, and so the types of all carries are checked."""
    model = models.load(GOLDEN / name)
    write = jax.shard_map(
        lambda model, tokens: model.generate(tokens, 3, temperature=0, stop=3, repetition_penalty=1.2)[0],
        mesh=MESH, in_specs=(P(), P("batch")), out_specs=P("batch"),
    )  # fmt: skip
    assert jax.eval_shape(write, model, TOKENS).shape == (4, 3)
    if name in EXACT_GELU and not erf_has_a_gradient_here():
        assert jax.eval_shape(inside, model, TOKENS, LENGTHS, RESETS).shape == ()
    else:
        assert (
            jax.eval_shape(jax.grad(inside), model, TOKENS, LENGTHS, RESETS).params.keys()
            == model.params.keys()
        )


@pytest.mark.sample("mamba2_0")
@pytest.mark.parametrize("name", ["mamba2_0", "qwen3_next_0"])
def test_values_and_gradients(name):
    model = models.load(GOLDEN / name)
    ours, theirs = (
        jax.jit(jax.value_and_grad(fn))(model, TOKENS, LENGTHS, RESETS) for fn in (inside, loss)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)
