"""The whole of jrnn in one breath: build an LSTM, differentiate it twice, run it, export it, and load it again."""

import jax
import numpy as np

import jrnn

T, N, D, H = 5, 3, 4, 6  # time, batch, input, hidden


def test_one_lstm(tmp_path):
    # build: a recurrent network from a step net, and the net that makes its parameters
    b = jrnn.NetBuilder("tiny")
    x, lengths = b.input("x"), b.input("lengths")
    lstm = jrnn.nets.cells.LSTM(b, x, lengths, None, D, H, "lstm")
    b.AveragedLoss(b.Sqr(lstm.hidden_all), "loss")
    net = b.build(outputs=["loss"])

    # run: operator by operator
    rng = np.random.default_rng(0)
    params = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    data = {
        "x": rng.standard_normal((T, N, D)).astype(np.float32),
        "lengths": np.array([5, 2, 4], np.int32),
    }
    ran = jrnn.run_net(net, {**params, **data})

    # the same as a pure function, compiled, and differentiated by JAX
    loss = jrnn.to_jax(net)
    value, by_jax = jax.jit(jax.value_and_grad(lambda p: loss({**p, **data})["loss"]))(params)
    np.testing.assert_allclose(value, ran["loss"], rtol=1e-6)

    # differentiated as a net, with a backward step net
    training_net, gradients = jrnn.add_gradients(net, ["loss"])
    by_net = jrnn.run_net(training_net, {**params, **data})
    for name in params:
        np.testing.assert_allclose(by_net[gradients[name]], by_jax[name], rtol=1e-5, atol=1e-7)

    # proved: both gradients and central differences, in float64
    report = jrnn.check_gradients(net, {**params, **data}, "loss", wrt=params)
    assert report.agrees, report

    # exported and loaded again: the same net, the same numbers
    jrnn.write_net(training_net, tmp_path / "training_net.pb")
    loaded = jrnn.read_net(tmp_path / "training_net.pb")
    assert loaded == training_net
    again = jrnn.run_net(loaded, {**params, **data})
    np.testing.assert_array_equal(again["loss"], by_net["loss"])
