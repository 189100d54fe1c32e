"""The programs in examples/ run and reach what they say."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_recurrent_policy_learns_what_needs_memory(capsys):
    curve = load("recurrent_policy").train(240, report_every=60)
    assert curve[0] < 0.35 and curve[-1] > 0.95
    assert len(capsys.readouterr().out.splitlines()) == len(curve) == 4


def test_the_policy_is_trained_on_what_it_acted_by(monkeypatch):
    example = load("recurrent_policy")
    monkeypatch.setattr(example, "ENVIRONMENTS", 4)
    params, world = example.init(jax.random.key(0)), example.begin(jax.random.key(1), 4)
    state = jnp.ones((1, 4, example.HIDDEN))
    (after, last), (seen, resets, _, reward, done) = example.rollout(params, world, state, jax.random.key(2))
    _, _, replayed = example.policy(params, seen, state, resets)
    np.testing.assert_allclose(replayed, last, atol=1e-5)
    assert resets.sum() > 8 and bool((resets[1:] == done[:-1]).all()) and bool((after.first == done[-1]).all())
    shown = np.asarray(seen).argmax(-1)
    assert (shown[done] == example.CUES).all() and (shown[resets] < example.CUES).all()
    assert not seen[~(resets | done)].any() and not reward[~done].any()
