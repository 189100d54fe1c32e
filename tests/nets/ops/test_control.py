"""Do, If, While: recorded Caffe2 nets, gradients as nets and by JAX, the builder's blocks, what is refused."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn import Net
from jrnn.errors import GradientError, JrnnError, NetError, OpError
from jrnn.loops.while_loops.trips import Trips, run_trips
from jrnn.nets import Op
from jrnn.nets.ops import effects

pytestmark = pytest.mark.usefixtures("little_compilation")

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "control.npz")
NAMES = sorted({k.split("|")[0] for k in GOLDEN.files})
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_net_eager_and_traced(name):
    net = jrnn.read_net(GOLDEN[name + "|net"].tobytes())
    keys = [k.split("|") for k in GOLDEN.files if k.startswith(name + "|")]
    blobs = {k[2]: GOLDEN["|".join(k)] for k in keys if k[1] == "in"}
    want = {k[2]: GOLDEN["|".join(k)] for k in keys if k[1] == "out"}
    fn = jrnn.to_jax(net, list(want))
    for got in (jrnn.run_net(net, blobs), jax.jit(fn)(blobs), jax.jit(lambda: fn(blobs))()):
        for blob, value in want.items():
            np.testing.assert_allclose(got[blob], value, atol=1e-6, err_msg=blob)


def _loop(body, *, inputs=("x", "w", "b")):
    """`body` n times, on a state h that begins as x; the loss is the sum of its squares."""
    b = jrnn.NetBuilder("loop")
    for name in inputs:
        b.input(name)
    n = b.input("n")
    i = b.ConstantFill([], "i", shape=[1], dtype=2, value=0)
    one = b.ConstantFill([], "one", shape=[1], dtype=2, value=1)
    b.Copy("x", "h")
    with b.while_():
        with b.condition():
            b.Add([i, one], "i")
            b.LE(["i", n], "go")
        body(b)
    b.SumElements(b.Sqr("h"), "loss")
    return b.build()


def _fc(b):
    b.Tanh(b.FC(["h", "w", "b"], "f"), "h")


def _in_place(b):
    # Caffe2 keeps what the blobs hold after the body, and overwrites the gradient of w instead of adding to it
    b.Mul(["h", "w"], "h")
    b.Sum(["h", "x"], "t")
    b.Tanh("t", "t")
    b.Mul(["t", "h"], "h")


@pytest.mark.sample("_fc-4")
@pytest.mark.parametrize(("body", "trips"), [(_fc, 0), (_fc, 4), (_in_place, 3)])
def test_gradient_of_while_three_ways(body, trips):
    shapes = {"x": (2, 3), "w": (3, 3), "b": (3,)} if body is _fc else {"x": (3,), "w": (3,)}
    blobs = {k: RNG.standard_normal(s) for k, s in shapes.items()} | {
        "n": np.array([trips], np.int32)
    }
    report = jrnn.check_gradients(_loop(body, inputs=tuple(shapes)), blobs, "loss", max_elements=4)
    assert report.agrees, str(report)


def _until(b):
    """Doubles by w until the sum of squares passes a limit: the number of trips depends on the data."""
    b.Copy(b.input("x"), "h")
    with b.while_():
        with b.condition():
            b.LT([b.SumElements(b.Sqr("h")), b.input("limit")], "go")
        b.Mul(["h", b.input("w")], "h")
    b.SumElements(b.Sqr("h"), "loss")
    return b.build()


def test_gradient_of_a_loop_whose_trips_depend_on_the_data():
    net = _until(jrnn.NetBuilder("until"))
    blobs = {"x": np.float32([0.5, 0.3]), "w": np.float32([1.5, 1.2]), "limit": np.float32(20)}
    full, gradients = jrnn.add_gradients(net, ["loss"])
    by_net = jrnn.run_net(full, blobs)
    for trips in (Trips(), Trips("bounded", 20)):
        fn = jrnn.to_jax(net, ["loss"], trips=trips)
        got = jax.jit(jax.grad(lambda p, fn=fn: fn(p)["loss"]))(blobs)
        for name in ("x", "w"):
            np.testing.assert_allclose(got[name], by_net[gradients[name]], rtol=1e-5)
    on_host = jrnn.to_jax(net, ["loss"], trips=Trips("host"))
    got = jax.grad(lambda p: on_host(p)["loss"])(blobs)
    for name in ("x", "w"):
        np.testing.assert_allclose(got[name], by_net[gradients[name]], rtol=1e-5)
    with pytest.raises(OpError, match="needs the values of its inputs"):
        jax.jit(on_host)(blobs)


def test_loop_over_its_bound_says_so_at_run_time():
    fn = jax.jit(
        lambda limit: run_trips(
            lambda c, s: s < c, lambda c, s: s + 1, limit, 0.0, Trips("bounded", 3)
        )
    )
    assert fn(3.0) == 3
    with pytest.raises(Exception, match="continues after its bound of 3 trips"):
        fn(4.0).block_until_ready()
        jax.effects_barrier()


@pytest.mark.sample("31")
@pytest.mark.parametrize("trips", [0, 1, 31, 32, 33, 70, 1100])
def test_checkpointed_loop_against_a_scan(x64, trips):
    w, x = jnp.asarray(RNG.standard_normal((2, 2)) * 0.7), jnp.asarray(RNG.standard_normal(2))

    def step(w, s):
        return {"i": s["i"] + 1, "h": jnp.cos(s["h"] @ w)}

    @jax.jit
    def by_loop(w, x, n):
        start = {"i": jnp.int32(0), "h": x}
        return run_trips(lambda c, s: s["i"] < c[1], lambda c, s: step(c[0], s), (w, n), start)[
            "h"
        ].sum()

    def by_scan(w, x):
        return jax.lax.scan(lambda h, _: (jnp.cos(h @ w), None), x, None, length=trips)[0].sum()

    n = jnp.int32(trips)
    got = jax.grad(lambda w, x: by_loop(w, x, n), argnums=(0, 1))(w, x)
    for one, two in zip(got, jax.grad(by_scan, argnums=(0, 1))(w, x)):
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


def _branches(b):
    """An If in an If, the outer one without else, on a blob that is overwritten in place."""
    x, w = b.input("x"), b.input("w")
    first, second = b.input("first"), b.input("second")
    b.Tanh(x, "y")
    with b.if_(first):
        b.Mul(["y", w], "y")
        with b.if_(second):
            b.Sigmoid("y", "y")
        with b.else_():
            b.Sum([b.Mul(["y", "x"]), "y"], "y")
    b.SumElements(b.Mul(["y", w]), "loss")
    return b.build()


def test_gradient_of_nested_branches():
    net = _branches(jrnn.NetBuilder("branches"))
    blobs = {k: RNG.standard_normal(3).astype(np.float32) for k in "xw"}
    full, gradients = jrnn.add_gradients(net, ["loss"])
    by_net = jax.jit(jrnn.to_jax(full, [gradients["x"], gradients["w"]]))  # conditions are traced
    fn = jrnn.to_jax(net, ["loss"])
    by_jax = jax.jit(lambda p, conditions: jax.grad(lambda p: fn({**p, **conditions})["loss"])(p))

    def by_hand(x, w, first, second):
        y = jnp.tanh(x)
        if first:
            y = y * w
            y = jax.nn.sigmoid(y) if second else y * x + y
        return (y * w).sum()

    for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
        conditions = {"first": np.array([first], bool), "second": np.array([second], bool)}
        want = jax.grad(by_hand, argnums=(0, 1))(blobs["x"], blobs["w"], first, second)
        jaxs = by_jax(blobs, {k: jnp.asarray(v) for k, v in conditions.items()})
        nets = by_net({**blobs, **{k: jnp.asarray(v) for k, v in conditions.items()}})
        eager = jrnn.run_net(full, {**blobs, **conditions})
        for name, value in zip("xw", want):
            for got in (jaxs[name], nets[gradients[name]], eager[gradients[name]]):
                np.testing.assert_allclose(
                    got, value, atol=1e-6, err_msg=f"{name} {first} {second}"
                )


def test_gradient_passes_a_branch_that_leaves_the_blob_alone():
    b = jrnn.NetBuilder("n")
    x, c = b.input("x"), b.input("c")
    b.Tanh(x, "y")
    with b.if_(c):
        b.Mul([x, x], "y")  # overwrites y without reading it
    b.SumElements("y", "loss")
    full, gradients = jrnn.add_gradients(b.build(), ["loss"])
    value = np.float32([0.5, -1.0])
    for taken, want in ((True, 2 * value), (False, 1 - np.tanh(value) ** 2)):
        got = jrnn.run_net(full, {"x": value, "c": np.array(taken)})
        np.testing.assert_allclose(got[gradients["x"]], want, rtol=1e-6)


def test_what_only_a_later_branch_reads_is_kept():
    """The condition is traced, so an If leaves out what nothing reads; the second If reads h inside its branch alone."""
    double, square = (
        Net("branch", (Op.of(*words),))
        for words in (("Sum", ["x", "x"], ["h"]), ("Mul", ["h", "h"], ["y"]))
    )
    ops = (
        Op.of("If", ["c", "x"], ["h"], then_net=double),
        Op.of("If", ["c"], ["y"], then_net=square),
    )
    outputs = jax.jit(jrnn.to_jax(Net("n", ops), ["y"]))(
        {"c": np.array([True]), "x": np.ones(2), "h": np.ones(2), "y": np.ones(2)}
    )
    np.testing.assert_array_equal(outputs["y"], [4, 4])


def test_if_inside_a_step_net():
    b = jrnn.NetBuilder("outer")
    step = jrnn.NetBuilder("step", parent=b)
    x, h, t = step.input("x_t"), step.input("h_prev"), step.input("timestep")
    step.Add([x, h], "h")
    even = step.EQ([step.Mod([t], divisor=2), step.ConstantFill([], shape=[1], dtype=2, value=0)])
    with step.if_(even):
        step.Tanh("h", "h")
    out = jrnn.recurrent_net(
        b,
        step.build(outputs=["h"]),
        [("x_t", b.input("x"))],
        [("h_prev", b.input("h0"))],
        {"h_prev": "h"},
        timestep="timestep",
    )
    xs = RNG.standard_normal((4, 2, 3)).astype(np.float32)
    got = jrnn.run_net(b.build(), {"x": xs, "h0": np.zeros(3, np.float32)})[out[0].all]
    h = np.zeros((2, 3), np.float32)
    for k in range(4):
        h = np.tanh(xs[k] + h) if k % 2 == 0 else xs[k] + h
        np.testing.assert_allclose(got[k], h, atol=1e-6)


def test_counters():
    ops = (
        Op.of("CreateCounter", [], ["c"], init_count=2),
        Op.of("CountDown", ["c"], ["first"]),
        Op.of("CountDown", ["c"], ["second"]),
        Op.of("CountDown", ["c"], ["third"]),
        Op.of("ResetCounter", ["c"], ["before"], init_count=5),
        Op.of("CountUp", ["c"], ["up"]),
        Op.of("RetrieveCount", ["c"], ["now"]),
    )
    got = jrnn.run_net(Net("n", ops), {})
    assert [bool(got[k]) for k in ("first", "second", "third")] == [False, False, True]
    assert [int(got[k]) for k in ("before", "up", "now")] == [-1, 5, 6]
    assert (
        int(jrnn.to_jax(Net("n", ops), ["now"])({})["now"]) == 6
    )  # what only changes the counter is not left out


def test_timers(monkeypatch):
    now = iter((100, 107, 120, 300, 350))
    monkeypatch.setattr(effects, "perf_counter_ns", lambda: next(now))
    ops = (
        Op.of("TimerBegin", [], ["first"], counter_name="work"),
        Op.of("TimerGet", ["first"], ["so_far"]),
        Op.of("TimerGetAndEnd", ["first"], ["in_all"]),
        Op.of("TimerBegin", [], ["second"]),
        Op.of("TimerGet", ["second"], ["other"]),
        Op.of("TimerEnd", ["second"], []),
    )
    got = jrnn.run_net(Net("n", ops), {})
    for name, value in (("so_far", 7), ("in_all", [20]), ("other", 50)):
        assert got[name].dtype == np.int64 and got[name].tolist() == value


@pytest.mark.parametrize("read", ["TimerGet", "TimerGetAndEnd"])
def test_timers_of_a_traced_net(read):
    """Nothing reads them, so the net is traced without them. An operator that reads one raises an error."""
    begin, get = Op.of("TimerBegin", [], ["t"]), Op.of(read, ["t"], ["ns"])
    ops = (begin, Op.of("Sqr", ["x"], ["y"]), get)
    x = np.ones(2, np.float32)
    assert jax.jit(jrnn.to_jax(Net("n", ops), ["y"]))({"x": x})["y"].tolist() == [1, 1]
    assert jrnn.nets.infer_shapes(Net("n", ops), {"x": x})["ns"].dtype == np.int64
    with pytest.raises(
        OpError, match="measures time .* ask for other outputs than 'ns', or give its value"
    ):
        jrnn.to_jax(Net("n", ops), ["ns"])({"x": x})
    with pytest.raises(OpError, match="must be a timer, made by TimerBegin; it is float32"):
        jrnn.run_net(Net("n", (Op.of(read, ["x"], ["ns"]),)), {"x": x})
    for last in (get, Op.of("TimerEnd", ["t"], [])):
        with pytest.raises(OpError, match="the timer has ended"):
            jrnn.run_net(Net("n", (begin, Op.of("TimerEnd", ["t"], []), last)), {})


def test_counters_and_timers_are_no_arrays():
    ops = (
        Op.of("CreateCounter", [], ["c"]),
        Op.of("TimerBegin", [], ["t"]),
        Op.of("Sqr", ["x"], ["y"]),
    )
    net = Net("n", ops, ("x",), ("y", "c", "t"))
    assert jrnn.nets.infer_shapes(net, {"x": np.ones(2, np.float32)}).keys() == {"x", "y"}
    assert jrnn.check_gradients(net, {"x": np.ones(2, np.float32)}).agrees


def test_endless_loop_is_stopped():
    b = jrnn.NetBuilder("n")
    b.Copy(b.input("x"), "h")
    with b.while_():
        with b.condition():
            b.LT(["h", b.input("limit")], "go")
        b.Copy("h", "h")
    blobs = {"x": np.zeros(1, np.float32), "limit": np.ones(1, np.float32)}
    with pytest.raises(
        OpError, match=r"op #\d+ While.*goes on after 10 trips; raise max_iterations"
    ):
        jrnn.run_net(b.build(), blobs, max_iterations=10)


def test_blocks_are_lexical():
    b = jrnn.NetBuilder("n")
    x, c = b.input("x"), b.input("c")
    with b.if_(c):
        b.Tanh(x, "local")
    with pytest.raises(NetError, match="reads blob 'local', which is not defined"):
        b.Tanh("local")
    with pytest.raises(NetError, match="reads blob 'missing', which is not defined"), b.if_(c):
        b.Tanh("missing")
    b.Tanh(x)
    with (
        pytest.raises(NetError, match=r"else_\(\) must follow an if_\(\) block directly"),
        b.else_(),
    ):
        pass
    with (
        pytest.raises(NetError, match="condition 'nowhere' of an if block is not defined"),
        b.if_("nowhere"),
    ):
        pass
    with (
        pytest.raises(NetError, match=r"must begin with a condition\(\) block, but has none"),
        b.while_(),
    ):
        b.Tanh(x)
    with pytest.raises(NetError, match=r"condition\(\) must come once"), b.condition():
        pass
    with (
        pytest.raises(NetError, match=r"condition\(\) must come once"),
        b.while_(),
        b.if_(c),
        b.condition(),
    ):
        pass


def test_what_cannot_be_run_says_why():
    b = jrnn.NetBuilder("n")
    x, c = b.input("x"), b.input("c")
    b.Copy(x, "y")
    with b.if_(c):
        b.Concat([x, x], ["y", "info"], axis=0)
    net = b.build()
    blobs = {"x": np.zeros((2, 2), np.float32), "c": np.array([True, False])}
    with pytest.raises(OpError, match=r"condition is bool\[2\]; it must be one boolean"):
        jrnn.run_net(net, blobs)
    with pytest.raises(
        OpError, match=r"'y' is float32\[4,2\] in one branch and float32\[2,2\] in the other"
    ):
        jax.jit(lambda c: jrnn.to_jax(net, ["y"])({"x": blobs["x"], "c": c}))(np.array([True]))
    do = Op.of(
        "Do", ["x", "w"], ["y", "v"], net=Net("body"), inner_blobs=["x"], outer_blobs_idx=[0]
    )
    with pytest.raises(
        OpError, match="the last input and the last output must be the same workspace"
    ):
        jrnn.run_net(Net("n", (do,)), {"x": blobs["x"], "w": blobs["x"]})
    loop = Op.of("While", ["go", "x"], ["x"], loop_net=Net("body", (Op.of("Tanh", ["x"], ["x"]),)))
    with pytest.raises(GradientError, match="body is Do operators"):
        jrnn.add_gradients(Net("n", (loop,)), ["x"])


def test_bad_trips_are_refused():
    for args in (("bounded",), ("checkpointed", 3), ("often",)):
        with pytest.raises(ValueError, match="policy"):
            Trips(*args)
    assert issubclass(OpError, JrnnError)
