"""The programs in examples/ run and reach what they say."""

import importlib.util
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

import jrnn

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_program_is_short_and_on_the_page_and_each_section_has_a_picture():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")
    table = runpy.run_path(str(EXAMPLES.parent / "docs" / "tables.py"))["render"]("programs")
    programs = sorted(EXAMPLES.glob("*.py"))
    start = (EXAMPLES.parent / "docs" / "start.md").read_text(encoding="utf-8")
    assert f"There are {len(programs)}, each" in page and f"has {len(programs)} programs" in start
    for path in programs:
        assert f"\n| [{path.stem}](" in table and f"`{path.stem}.ipynb`" in table, path.stem
        assert len(path.read_text(encoding="utf-8").splitlines()) < 150, path.stem
    for section in page.split("\n## ")[1:]:
        assert "\n![" in section, section


@pytest.mark.exhaustive
def test_a_recurrent_policy_learns_what_needs_memory(capsys):
    curve = load("recurrent_policy").train(240, report_every=60)
    assert curve[0] < 0.35 and curve[-1] > 0.95
    assert len(capsys.readouterr().out.splitlines()) == len(curve) == 4


@pytest.mark.exhaustive
def test_a_character_model_learns_and_writes():
    example = load("char_model")
    params, characters, losses = example.train(steps=40, hidden=16, report_every=20)
    assert losses[-1] < losses[0] - 0.5
    text = example.sample(params, characters, prompt="The ", length=5)
    assert text.startswith("The ") and len(text) == 9 and set(text) <= set(characters)


@pytest.mark.exhaustive
def test_a_flax_model_learns_from_sequences_with_padding():
    _, accuracy = load("flax_model").train(steps=60, hidden=8)
    assert accuracy > 0.75


@pytest.mark.exhaustive
def test_a_cell_of_ones_own_is_proved_and_learns():
    example = load("own_cell")
    example.check(hidden=1)
    losses = example.train(steps=120, hidden=16, report_every=60)
    assert np.mean(losses[-20:]) < 0.6 * np.mean(losses[:5])


@pytest.mark.exhaustive
def test_a_caffe2_net_is_tuned_and_exported(tmp_path):
    example = load("caffe2_finetune")
    example.old_package(tmp_path / "old", hidden=4)
    before, after, tuned = example.finetune(tmp_path / "old", tmp_path / "tuned", steps=40)
    assert after < 0.2 * before
    assert jrnn.convert.load_package(tmp_path / "tuned").predict_net == tuned.predict_net


@pytest.mark.exhaustive
def test_the_policy_is_trained_on_what_it_acted_by(monkeypatch):
    example = load("recurrent_policy")
    monkeypatch.setattr(example, "ENVIRONMENTS", 4)
    params, world = example.init(jax.random.key(0)), example.begin(jax.random.key(1), 4)
    state = jnp.ones((1, 4, example.HIDDEN))
    (after, last), (seen, resets, _, reward, done) = example.rollout(
        params, world, state, jax.random.key(2)
    )
    _, _, replayed = example.policy(params, seen, state, resets)
    np.testing.assert_allclose(replayed, last, atol=1e-5)
    assert (
        resets.sum() > 8
        and bool((resets[1:] == done[:-1]).all())
        and bool((after.first == done[-1]).all())
    )
    shown = np.asarray(seen).argmax(-1)
    assert (shown[done] == example.CUES).all() and (shown[resets] < example.CUES).all()
    assert not seen[~(resets | done)].any() and not reward[~done].any()


@pytest.mark.exhaustive
def test_a_hidden_markov_model_is_learned_and_its_gradient_is_the_posterior():
    example = load("hmm")
    params, losses, best, _, symbols = example.train(120)
    assert losses[-1] < best + 0.1 < losses[0]
    chances = example.posterior(params, symbols)
    np.testing.assert_allclose(chances.sum(-1), 1, atol=1e-5)
    assert chances.min() >= -1e-6


@pytest.mark.exhaustive
def test_a_stream_is_learned_as_it_comes_and_again_after_it_changed():
    example = load("online_learning")
    stream = example.signal(4000)
    exact, short = (
        example.windows(example.learn(step, stream)[1])
        for step in (example.step, example.truncated)
    )
    assert exact[4] < 0.5 * exact[0] and exact[9] < 0.6 * exact[5] and exact[5] > 2 * exact[4]
    assert exact[4] < 0.7 * short[4] and exact[9] < 0.9 * short[9]


@pytest.mark.exhaustive
def test_a_kalman_filter_finds_the_noises():
    example = load("kalman")
    std, losses, (filtered, raw) = example.train(150)
    assert losses[-1] < losses[0]
    for name, value in std.items():
        np.testing.assert_allclose(value, example.TRUE[name], rtol=0.25)
    assert filtered < 0.7 * raw


@pytest.mark.exhaustive
def test_a_neural_ode_follows_paths_longer_than_it_has_seen():
    _, losses, error = load("neural_ode").train(60)
    assert losses[-1] < 0.1 * losses[0] and error < 0.5


@pytest.mark.exhaustive
def test_series_of_different_lengths_are_forecast():
    example = load("time_series")
    model, losses, _ = example.train(30, hidden=16)
    assert losses[-1] < 0.75 * losses[0]
    values, lengths = example.data(jax.random.key(1))
    x, _, _ = example.prepared(values, lengths)
    changed = jnp.where(
        jnp.arange(len(x))[:, None, None] < lengths[None, :, None], x, 9.0
    )  # padding does not matter
    np.testing.assert_allclose(model(x, lengths)[1], model(changed, lengths)[1], atol=1e-6)


@pytest.mark.exhaustive
def test_a_policy_without_velocities_learns_to_balance():
    _, lengths = load("recurrent_ppo").train(jax.random.key(0), 30)
    assert lengths[-5:].mean() > 1.25 * lengths[:5].mean()


def test_a_time_limit_is_no_end():
    """What follows it counts by the value of the state that was reached; what follows a fall is worth nothing."""
    example = load("recurrent_ppo")
    states = jnp.zeros((example.ENVIRONMENTS, 4)).at[:2, 2].set(1.0)  # in two the pole has fallen
    ages = jnp.zeros(example.ENVIRONMENTS, int).at[1:3].set(example.LONGEST - 1)
    actions = jnp.ones(example.ENVIRONMENTS, int)
    (_, age), reached, *ends = example.advance((states, ages), actions, jax.random.key(0))
    assert [end[:4].tolist() for end in ends] == [
        [True, True, False, False],
        [False, False, True, False],
    ]
    assert age[:4].tolist() == [0, 0, 0, 1] and reached[0, 2] > 0.2095
    no = jnp.zeros((2, 3), bool)
    terminated, truncated = no.at[0, 0].set(True), no.at[0, 1].set(True)
    value, after = jnp.full((2, 3), 2.0), jnp.full((2, 3), 5.0)
    gain = example.advantages(value, after, terminated, truncated)
    last = 1 + example.DISCOUNT * 5 - 2
    later = last + example.SMOOTHING * example.DISCOUNT * last
    np.testing.assert_allclose(gain, [[-1, last, later], [last] * 3], rtol=1e-6)


@pytest.mark.exhaustive
def test_a_pretrained_model_is_tuned_layer_by_layer(monkeypatch):
    example = load("finetune_pretrained")
    monkeypatch.setitem(example.CONFIG, "num_hidden_layers", 1)
    (before, last_layer, every), written = example.main(steps=40)
    assert every < last_layer < 0.5 * before and written.startswith("2+3=")


@pytest.mark.exhaustive
def test_the_delta_rule_recalls_what_linear_attention_mixes_up_and_is_trained_in_chunks():
    example = load("linear_attention")
    rights = {
        step.__name__: example.train(step, 50)[1][-1]
        for step in (example.linear_attention, example.delta_rule)
    }
    assert rights["delta_rule"] > 0.9 and rights["linear_attention"] < 0.5
    assert example.loops(example.delta_rule).loops[0].strategy == "chunks"
    keys, _, last = example.sequences(np.random.default_rng(0))
    assert (last[0] == -1).all() and (last >= 0).mean() > 0.9 and keys.max() == example.KEYS - 1


@pytest.mark.exhaustive
def test_an_equinox_model_trains_with_the_loops_of_jrnn():
    pytest.importorskip("equinox")
    example = load("equinox_lstm")
    losses, right = example.train(60, hidden=24)
    assert losses[-1] < 0.5 * losses[0] and right > 0.85
    few = [example.train(2, hidden=4, optimized=optimized)[0] for optimized in (True, False)]
    np.testing.assert_allclose(*few, rtol=1e-5)


@pytest.mark.exhaustive
def test_the_step_of_a_page_streams_what_the_model_computes(tmp_path):
    """What the page does in JavaScript, by the same file and the same runtime."""
    example = load("browser_streaming")
    model, before, after = example.train(40, hidden=8)
    assert after < 0.7 * before
    expected = example.write(model, tmp_path / "page")
    stream = json.loads((tmp_path / "page" / "stream.json").read_text())
    session = onnxruntime.InferenceSession(tmp_path / "page" / "step.onnx")
    state, outputs = np.zeros((1, 1, stream["hidden"]), np.float32), []
    for value in stream["noisy"]:
        y, state = session.run(
            ["output/0", "output/1"], {"x": np.float32([[value]]), "state": state}
        )
        outputs.append(y.item())
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    page = (tmp_path / "page" / "index.html").read_text()
    assert all(
        name in page
        for name in ("stream.json", "step.onnx", "output/0", "output/1", "stream.expected")
    )


def test_a_filter_is_learned_and_advantages_are_those_of_a_loop(monkeypatch):
    example = load("filters")
    monkeypatch.setattr(example, "SAMPLES", 400)
    _, losses = example.learn(60)
    assert losses[-1] < 0.3 * losses[0]
    rng = np.random.default_rng(0)
    rewards, values, last = rng.normal(size=20), rng.normal(size=20), np.float32(0.7)
    done = (rng.random(20) < 0.2).astype(np.float32)
    wanted, later, following = np.zeros(20), 0.0, last
    for t in reversed(range(20)):
        goes_on = 0.99 * (1 - done[t])
        later = rewards[t] + goes_on * following - values[t] + goes_on * 0.95 * later
        wanted[t], following = later, values[t]
    ours = example.advantages(*map(jnp.float32, (rewards, values)), last, jnp.float32(done))
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)
