"""What a check finds besides the plain comparison: the operator at fault, Jacobians, directions, second derivatives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.jaxprs.flat import source_of
from jrnn.nets import Op, cells, registry
from jrnn.testing.gradients import (
    Effort,
    Fault,
    GradientReport,
    check,
    over_time,
    subject_of_function,
    subject_of_net,
)
from jrnn.testing.gradients.compare import direction_errors
from jrnn.testing.gradients.report import marks

RNG = np.random.default_rng(0)


pytestmark = pytest.mark.usefixtures("little_optimization")


def plant(monkeypatch, type, wrong):
    """Puts an operator in the place of another that multiplies what it gives."""
    right = registry.lookup(type)

    def forward(*args, **kwargs):
        results = right.forward(*args, **kwargs)
        return tuple(wrong * r for r in results) if isinstance(results, tuple) else wrong * results

    monkeypatch.setitem(registry._OPS, type, replace(right, forward=forward))


def chain():
    """x -> h -> h (overwritten) -> y -> loss, with a table that is looked up on the way."""
    b = jrnn.NetBuilder("chain")
    x, table, rows = b.input("x"), b.input("table"), b.input("rows")
    h = b.Sigmoid(x, "h")
    b.Tanh(h, "h")
    y = b.Mul([h, b.Gather([table, rows], "looked")], "y")
    b.SumElements(b.Sin(y, "sines"), "loss")
    shapes = {"x": (3, 2), "table": (4, 2)}
    blobs = {n: RNG.standard_normal(s) for n, s in shapes.items()} | {
        "rows": np.array([3, 0, 3], np.int32)
    }
    return b.build(outputs=["y"]), blobs


@pytest.mark.exhaustive("TanhGradient-h-1")
@pytest.mark.parametrize("type, blob, place", [("TanhGradient", "h", 1), ("SinGradient", "y", 4)])
def test_the_first_operator_at_fault(type, blob, place, monkeypatch):
    net, blobs = chain()
    plant(monkeypatch, type, -1)
    report = jrnn.check_gradients(net, blobs, "loss")
    assert not report.agrees
    assert report.fault.operator.startswith(f"op #{place} {type.removesuffix('Gradient')} ")
    assert report.fault.blob == blob and report.fault.inside is None
    by_jax, by_net, difference = report.fault.values
    assert by_net == pytest.approx(-by_jax) and difference == pytest.approx(by_jax, rel=1e-6)
    assert "the net's is wrong" in str(report)


@pytest.mark.exhaustive
def test_a_wrong_forward_is_what_differences_tell(monkeypatch):
    """Its two gradients agree, and are not those of what it computes."""
    net, blobs = chain()
    right = registry.lookup("Sigmoid")

    @jax.custom_vjp
    def shifted(x):
        return right.forward(x) + 0.1 * x

    shifted.defvjp(lambda x: (shifted(x), right.forward(x)), lambda y, g: (g * y * (1 - y),))
    monkeypatch.setitem(registry._OPS, "Sigmoid", replace(right, forward=shifted))
    monkeypatch.setitem(
        registry._OPS,
        "SigmoidGradient",
        replace(
            registry.lookup("SigmoidGradient"),
            forward=lambda y, dy: dy * jax.nn.sigmoid(X) * (1 - jax.nn.sigmoid(X)),
        ),
    )
    X = blobs["x"]
    report = jrnn.check_gradients(net, blobs, "loss")
    assert all(b.net_error < 1e-12 for b in report.blobs)
    assert report.fault.operator.startswith("op #0 Sigmoid ") and "differences stand alone" in str(
        report.fault
    )


def recurrent():
    b = jrnn.NetBuilder("net")
    out = cells.BasicRNN(b, b.input("x"), None, None, 3, 2, "rnn")
    b.SumElements(b.Sin(out.hidden_all), "loss")
    net = b.build()
    shapes = {n: p.shape for n, p in b.params.items()} | {"x": (2, 1, 3)}
    return net, {n: RNG.standard_normal(shapes[n]) for n in net.external_inputs}


def stored_wrong(net):
    """The net with a backward step net that takes its tanh for a sigmoid."""

    def change(op):
        backward = op.arg("backward_step_net")
        if backward is None:
            return op
        ops = (
            replace(o, type="SigmoidGradient") if o.type == "TanhGradient" else o
            for o in backward.ops
        )
        return op.with_args({"backward_step_net": replace(backward, ops=tuple(ops))})

    return replace(net, ops=tuple(map(change, net.ops)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "type, inside",
    [
        ("TanhGradient", "op #2 Tanh -> 'rnn/hidden_t' in net 'rnn'"),
        (
            "RecurrentNetworkGradient",
            "the operators of its step net agree; the loop around them does not",
        ),
        (
            None,
            "the backward step net that it holds gives another gradient of 'rnn/gates_t_w' than its step net has",
        ),
    ],
)
def test_a_fault_within_a_step(type, inside, monkeypatch):
    net, blobs = recurrent()
    if type is None:
        net = stored_wrong(net)
    else:
        plant(monkeypatch, type, 2)
    fault = jrnn.check_gradients(net, blobs, "loss", max_elements=1).fault
    assert fault.type == "RecurrentNetwork"
    assert (fault.inside.operator if isinstance(fault.inside, Fault) else fault.inside) == inside


def training():
    """A training net with an update of its weights, and its blobs."""
    net = jrnn.read_net(
        """name: "training" external_input: "x" external_input: "w" external_input: "b"
        op { type: "FC" input: "x" input: "w" input: "b" output: "h" }
        op { type: "Tanh" input: "h" output: "y" }
        op { type: "Sum" input: "y" input: "h" output: "s" }
        op { type: "AveragedLoss" input: "s" output: "loss" }"""
    )
    net, _ = jrnn.add_gradients(net, ["loss"])
    update = Op.of("WeightedSum", ["w", "one", "w_grad", "rate"], ["w"])
    blobs = {n: RNG.standard_normal(s) for n, s in {"x": (3, 2), "w": (2, 2), "b": (2,)}.items()}
    blobs |= {"one": np.ones(1), "rate": -np.ones(1)}
    return replace(net, ops=(*net.ops, update)), blobs


def changed(net, of, **fields):
    """The net with another operator in place of one of a type."""
    ops = tuple(replace(op, **fields) if op.type == of else op for op in net.ops)
    return replace(net, ops=ops)


WRONG = {  # operators of the file -> what is named
    "type": ("TanhGradient", {"type": "SigmoidGradient"}, "op #6 SigmoidGradient -> 'h_grad'"),
    "inputs": ("TanhGradient", {"inputs": ("s", "s_grad")}, "op #6 TanhGradient -> 'h_grad'"),
    "outputs": (
        "FCGradient",
        {"outputs": ("b_grad", "w_grad", "x_grad")},
        "op #8 FCGradient -> 'b_grad', 'w_grad', 'x_grad'",
    ),
    "seed": (
        "ConstantFill",
        {"args": Op.of("ConstantFill", [], [], value=2.0).args},
        "op #4 ConstantFill -> 'loss_autogen_grad'",
    ),
    "missing": (
        "AveragedLossGradient",
        {"outputs": ("other",)},
        "op #6 TanhGradient -> 'h_grad'",
    ),
}


def test_gradient_operators_of_a_training_net_are_compared():
    net, blobs = training()
    report = jrnn.check_gradients(net, blobs, "loss")
    assert report.agrees and report.verdict().endswith("; so do the gradient operators in the file")
    assert {b.name for b in report.blobs} == {"x", "w", "b"}
    assert all(b.file_error < 1e-12 and b.file_value is not None for b in report.blobs)
    assert "|JAX - file|" in str(report)
    assert jrnn.check_gradients(net, blobs).agrees  # the loss is what the file differentiates


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_gradient_operator_in_a_file_is_named(case):
    of, fields, named = WRONG[case]
    net, blobs = training()
    report = jrnn.check_gradients(changed(net, of, **fields), blobs, "loss", max_elements=1)
    assert not report.agrees and report.conclusion() == "the gradients DISAGREE"
    assert all(b.net_error < 1e-12 for b in report.blobs), "of the generated backward net"
    assert report.verdict().endswith("; the gradient operators in the file do not")
    assert report.fault.operator.startswith(named)
    if case == "missing":
        assert "reads blob 's_grad', which no operator writes" in str(report)


def test_a_file_may_differentiate_several_losses_and_name_gradients_otherwise():
    b = jrnn.NetBuilder("two")
    h = b.Tanh(b.input("x"), "h")
    b.AveragedLoss(h, "cost")
    b.AveragedLoss(b.Sin(h, "s"), "aux")
    net, _ = jrnn.add_gradients(b.build(), ["cost", "aux"])
    blobs = {"x": RNG.standard_normal((2, 3))}
    names = {"s_grad": "ds"}
    renamed = tuple(
        replace(
            op,
            inputs=tuple(names.get(n, n) for n in op.inputs),
            outputs=tuple(names.get(n, n) for n in op.outputs),
        )
        for op in net.ops
    )
    for loss in (None, "cost", "aux"):
        assert jrnn.check_gradients(replace(net, ops=renamed), blobs, loss).agrees
    wrong = changed(net, "SinGradient", type="CosGradient")
    assert not jrnn.check_gradients(wrong, blobs).agrees
    assert jrnn.check_gradients(wrong, blobs, "cost").agrees, "it is not on the way"


@pytest.mark.exhaustive("True")
@pytest.mark.parametrize("both", [False, True])
def test_a_wrong_backward_step_net_in_a_file_is_named(both):
    net, blobs = recurrent()
    training_net, _ = jrnn.add_gradients(stored_wrong(net) if both else net, ["loss"])
    if not both:
        training_net = stored_wrong(training_net)
        ops = [*training_net.ops]
        ops[1] = net.ops[1]  # the forward operator, whose backward step net is right
        training_net = replace(training_net, ops=tuple(ops))
    fault = jrnn.check_gradients(training_net, blobs, "loss", max_elements=1).fault
    assert fault.type == ("RecurrentNetwork" if both else "RecurrentNetworkGradient")
    inside = fault.written if both else fault.inside
    assert inside.operator.startswith("op #0 SigmoidGradient -> 'rnn/gates_t_grad'")
    assert "has a TanhGradient there" in str(fault)


def test_the_whole_jacobian_or_one_gradient(monkeypatch):
    net, blobs = chain()
    plant(monkeypatch, "MulGradient", 2)
    report = jrnn.check_gradients(net, {**blobs, "x": blobs["x"]}, max_elements=2)
    assert report.loss is None and report.outputs == ("y",)
    assert report.worst[0].of.startswith("y[") and report.worst[0].values[1] == pytest.approx(
        2 * report.worst[0].values[0]
    )
    with jax.enable_x64(True):
        large = subject_of_net(
            jrnn.Net("n", (jrnn.nets.Op.of("Tanh", ["x"], ["y"]),)), {"x": np.zeros((70, 1))}
        )
    assert large.rows == 1 and large.seeds["y"].shape == (1, 70, 1)


def test_directions_see_every_element(x64):
    net = jrnn.Net(
        "n", (jrnn.nets.Op.of("Sqr", ["x"], ["y"]), jrnn.nets.Op.of("SumElements", ["y"], ["loss"]))
    )
    x = RNG.uniform(0.5, 1.0, 300)
    s = subject_of_net(net, {"x": x}, "loss")
    wrong = 2 * x
    wrong[100] *= 1.01
    errors = [direction_errors(s, {"x": g[None]}, ["x"], 2)["x"] for g in (2 * x, wrong)]
    assert errors[0] < 1e-8 and errors[1] > 1e-5


def test_second_derivatives():
    """A gradient that is right at first order, and stopped at second."""

    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (g * 3 * jax.lax.stop_gradient(x) ** 2,))
    x = RNG.standard_normal((2, 3))
    with jax.enable_x64(True):
        wrong = check(subject_of_function(cube, (x,)), Effort(1e-6, second=True))
        right = check(subject_of_function(lambda x: x**3, (x,)), Effort(1e-6, second=True))
    assert right.agrees and right.blobs[0].second_error < 1e-6
    assert not wrong.agrees and wrong.blobs[0].difference_error < 1e-6 < wrong.blobs[0].second_error


def test_no_second_derivative_is_said():
    def only_once(x):
        return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[
            1
        ]

    @jax.custom_vjp
    def twice_sine(x):
        return only_once(x)

    twice_sine.defvjp(
        lambda x: (only_once(x), x),
        lambda x, g: (g * only_once(x) * 0 + g * jnp.cos(jnp.sin(x)) * jnp.cos(x),),
    )
    with jax.enable_x64(True):
        report = check(
            subject_of_function(twice_sine, (RNG.standard_normal(2),)), Effort(1e-6, second=True)
        )
    assert report.blobs[0].second_error is None
    assert (
        "second derivatives were not compared: Reverse-mode differentiation does not work"
        in report.notes[0]
    )


def test_functions_that_are_not_of_float64():
    def narrow(h, x):
        return (h + x).astype(jnp.float32), x

    with (
        jax.enable_x64(True),
        pytest.raises(jrnn.errors.GradientError, match="narrow does not run in float64"),
    ):
        subject_of_function(over_time(narrow), (np.ones(2), np.ones((3, 2))))


def test_colors_of_blobs_within(x64):
    net, blobs = chain()
    s = subject_of_net(net, blobs, "loss")
    report = check(s, Effort(), inner=True)
    assert set(report.inner) == {"h", "looked", "y", "sines", "loss"}
    colors = marks(replace(report, inner={**report.inner, "y": 3e-11, "h": float("nan")}))
    assert {n: words.split(",")[0] for n, (_, words) in colors.items()} == {
        **dict.fromkeys(("x", "table", "looked", "sines", "loss"), "agrees"),
        "y": "near",
        "h": "disagrees",
    }


def test_json_has_no_numbers_that_json_lacks():
    report = GradientReport(float("nan"), (), 1e-10, 1e-6, inner={"y": float("inf")})
    assert report.to_dict()["loss"] == "nan" and report.to_dict()["inner"] == {"y": "inf"}


def test_inputs_without_a_gradient_are_told():
    net = jrnn.Net(
        "n",
        (
            jrnn.nets.Op.of(
                "SpatialBN", ["x", "scale", "shift", "mean", "var"], ["y"], is_test=1, order="NCHW"
            ),
        ),
    )
    shapes = {"x": (1, 2, 2, 1), "scale": (2,), "shift": (2,), "mean": (2,), "var": (2,)}
    blobs = {n: RNG.uniform(0.5, 1.0, shape) for n, shape in shapes.items()}
    report = jrnn.check_gradients(net, blobs)
    assert report.agrees and [b.name for b in report.blobs] == ["x", "scale", "shift"]
    assert report.notes == (
        "the net has no gradient of mean, var, and JAX has: they were left out",
    )
    assert not jrnn.check_gradients(net, blobs, wrt=["mean"]).agrees


def test_types_that_a_net_names_do_not_narrow_the_check():
    """A Cast to float within the net, weights that the net itself fills, and half precision on the way."""
    ops = (
        Op.of("Cast", ["x"], ["single"], to=1, from_type=1),
        Op.of("Cast", ["single"], ["half"], to=12, from_type=1),
        Op.of("Cast", ["half"], ["image"], to=1, from_type=12),
        Op.of("GivenTensorFill", [], ["w"], shape=[1, 1, 2, 2], values=[0.1, -0.2, 0.3, 0.7]),
        Op.of("Conv", ["image", "w"], ["y"], kernel=2),
    )
    report = jrnn.check_gradients(
        jrnn.Net("n", ops, ("x",), ("y",)), {"x": RNG.standard_normal((1, 1, 3, 3))}
    )
    assert report.agrees and report.blobs[0].net_error == 0, report


def test_gradients_that_an_argument_cuts_are_said_to_be():
    net, blobs = recurrent()
    k = next(k for k, op in enumerate(net.ops) if op.type == "RecurrentNetwork")
    rnn = net.ops[k].with_args({"outputs_with_grads": [1]})
    net = replace(net, ops=(*net.ops[:k], rnn, *net.ops[k + 1 :]))
    fault = jrnn.check_gradients(net, blobs).fault
    assert fault.type == "RecurrentNetwork"
    assert (
        f"because argument outputs_with_grads [1] lets only the gradients of '{rnn.outputs[1]}' pass"
        in str(fault)
    )


@pytest.mark.exhaustive("op1-grad_on_weights is 0")
@pytest.mark.parametrize(
    "op, because",
    [
        (Op.of("StopGradient", ["x"], ["y"]), "every gradient ends at a StopGradient"),
        (Op.of("SparseLengthsWeightedSum", ["t", "x", "i", "l"], ["y"]), "grad_on_weights is 0"),
    ],
)
def test_gradients_that_end_by_design_are_said_to(op, because):
    x, t = RNG.standard_normal(2), RNG.standard_normal((3, 2))
    blobs = {"x": x, "t": t, "i": np.array([2, 0], np.int32), "l": np.array([2], np.int32)}
    read = {n: v for n, v in blobs.items() if n in op.inputs}
    fault = jrnn.check_gradients(jrnn.Net("n", (op,), tuple(read), ("y",)), read, wrt=["x"]).fault
    assert "differences stand alone, because " in str(fault) and because in str(fault)


def test_a_source_is_the_users_line():
    scan = jax.make_jaxpr(over_time(lambda c, x: (c + x, c * x)))(1.0, np.ones(3)).eqns[0]
    assert source_of(scan) == ""  # the loop is jrnn's own
    assert all(source_of(eqn).startswith("test_check.py:") for eqn in scan.params["jaxpr"].eqns)
