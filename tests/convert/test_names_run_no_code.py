"""Names in files of strangers: they never become Python code, markup, or commands to a terminal."""

import ast
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import jrnn
from jrnn import Net
from jrnn.cli import main
from jrnn.convert import Package, to_python
from jrnn.nets import Op
from jrnn.nets.graph import show, to_dot, to_svg
from jrnn.nets.ir import Arg, DeviceOption, ExecutionStep, Plan
from jrnn.nets.plans import show_steps
from jrnn.testing.gradients.report import BlobAgreement, Fault, GradientReport, page

pytestmark = pytest.mark.usefixtures("little_compilation")

HOSTILE = (
    'x""";import os;os.abort()#',
    "x''';import os;os.abort()#",
    "'];import os;os.abort();['",
    '"];import os;os.abort();["',
    "x\nimport os;os.abort()\n",
    "\\",
    "\\'",
    "{0}{x}{{}}{0.__class__}",
    "$inputs ${body}",
    "a.reshape((2,)).reshape(",
    "((([[[",
    "# coding: latin-1",
    "\x1b]0;title\x07\x1b[2J\r\x9b31m",
    "\u202eevil\u2028line\ufeff",
    "</title></svg><script>alert(1)</script>",
    '" onload="alert(1)',
    '\\"];evil[label="',
    "ｊａｘ ªº²",
    "]]> <!-- --> &amp; &#0;",
)
FIELDS = ("net", "type", "op", "engine", "arg", "text", "node", "x", "w", "h", "y", "step")


def model(names):
    """A net that has a name in every field for which `names` has one."""
    n = {field: names.get(field, field) for field in FIELDS}
    more = (Arg(n["arg"], n["text"].encode("utf-8", "surrogatepass"), "s"),)
    device = DeviceOption(node_name=n["node"])
    step = Net(
        n["step"], (Op.of("Relu", [n["h"]], [n["y"]]),), (n["h"],), (n["y"],), type=n["type"]
    )
    branch = Op.of("If", ["go"], [n["y"]], then_net=step, else_net=step)
    ops = (
        replace(
            Op.of("Add", [n["x"], n["w"]], [n["h"]]),
            args=more,
            name=n["op"],
            engine=n["engine"],
            device_option=device,
        ),
        Op.of("GivenTensorBoolFill", [], ["go"], shape=[1], values=[1]),
        branch,
    )
    return Net(
        n["net"], ops, (n["x"], n["w"]), (n["y"],), type=n["type"], args=more, device_option=device
    )


def source(names):
    net = model(names)
    init = Net(
        "init",
        (
            Op.of(
                "GivenTensorFill", [], [net.external_inputs[1]], shape=[3], values=[1.0, 2.0, 3.0]
            ),
        ),
    )
    return to_python(Package(init, net), {net.external_inputs[0]: np.ones(3, np.float32)})[0]


def source_of_onnx(names):
    """The Python of an ONNX model that has a name in every field for which `names` has one; an error's text if refused."""
    n = {field: names.get(field, field) for field in FIELDS}
    nodes = (
        helper.make_node("MatMul", [n["x"], n["w"]], [n["h"]], name=n["op"], doc_string=n["text"]),
        helper.make_node("Relu", [n["h"]], [n["y"]], name=n["node"]),
    )
    x, y = (
        helper.make_tensor_value_info(n[k], TensorProto.FLOAT, s)
        for k, s in (("x", [2, 3]), ("y", [2, 2]))
    )
    weight = numpy_helper.from_array(np.ones((3, 2), np.float32), n["w"])
    graph = helper.make_graph(nodes, n["net"], [x], [y], [weight], doc_string=n["text"])
    proto = helper.make_model(
        graph, producer_name=n["engine"], opset_imports=[helper.make_opsetid("", 17)]
    )
    proto.metadata_props.add(key=n["arg"], value=n["text"])
    model = jrnn.from_onnx(proto.SerializeToString())
    feeds = {model.inputs[0].name: np.ones((2, 3), np.float32)}
    package = jrnn.from_jax(
        lambda params, inputs: model(inputs, params), feeds, params=model.params, name=n["net"]
    )
    [name] = (x for x in package.predict_net.external_inputs if x not in package.weight_names)
    return to_python(package, {name: feeds[model.inputs[0].name]})[0]


def structure(text):
    """The syntax of a program, without what is in its strings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def harmless(name):
    return re.sub(r"\W", " ", name, flags=re.ASCII) or " "


CASES = [{field: text + " " + field for field in ("net", "x", "y")} for text in HOSTILE]
RANDOM = random.Random(0)
CASES += [{field: RANDOM.choice(HOSTILE) + " " + field for field in FIELDS} for _ in range(6)]
CASES += [
    {f: "".join(RANDOM.choices("\"'\\\n\r{}[]();#$ \0ax\x1b", k=12)) + " " + f for f in FIELDS}
    for _ in range(6)
]


@pytest.mark.exhaustive
def test_no_name_becomes_python():
    for names in CASES:
        code = source(names)
        assert structure(code) == structure(source({f: harmless(n) for f, n in names.items()})), (
            names
        )
        texts = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
        assert {n for f, n in names.items() if f in ("x", "y")} <= texts


@pytest.mark.exhaustive
def test_no_name_of_an_onnx_model_becomes_python():
    for names in CASES:
        code = source_of_onnx(names)
        assert structure(code) == structure(
            source_of_onnx({f: harmless(n) for f, n in names.items()})
        ), names
        texts = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
        assert any(isinstance(t, str) and names.get("x", "x") in t for t in texts)


def test_the_command_of_the_report_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = 'x""";__import__("pathlib").Path("pwned").touch();"""'
    for k, names in enumerate(({"net": name}, {"x": name}, {"h": name, "y": name, "step": name})):
        net = model(names)
        jrnn.write_net(net, tmp_path / "evil.pbtxt")
        feeds = [f"--feed={n}=normal[2]" for n in net.external_inputs if "=" not in n]
        out = f"e{k}\udcff.py"  # a name of a file need not be UTF-8
        assert main(["convert", "evil.pbtxt", out, *feeds]) == 0, capsys.readouterr().err
    assert not (tmp_path / "pwned").exists()


def test_weights_may_have_the_names_of_numpys_parameters(tmp_path):
    names = ["file", "allow_pickle", "a/../b", "a", "é" * 300]
    net = Net(
        "n",
        tuple(Op.of("Relu", [n], [f"{n}_out"]) for n in names),
        tuple(names),
        tuple(f"{n}_out" for n in names),
    )
    fills = [
        Op.of("GivenTensorFill", [], [n], shape=[2], values=[k, 2.0 * k])
        for k, n in enumerate(names)
    ]
    jrnn.convert.write_python(Package(Net("init", tuple(fills)), net), tmp_path / "model.py")
    module = {"__file__": str(tmp_path / "model.py"), "__name__": "model"}
    exec(compile((tmp_path / "model.py").read_text(encoding="utf-8"), "model.py", "exec"), module)
    weights = module["load_weights"]()
    assert sorted(weights) == sorted(names) and weights["a"].tolist() == [3, 6]
    for bad in (
        "a.npy",
        "x" * 100_000,
        "n\0",
    ):  # of which two files would be one, and two cannot be stored
        renamed = replace(
            net, ops=(*net.ops, Op.of("Relu", [bad], ["z"])), external_outputs=("z", "a_out")
        )
        init = Net(
            "init", (*fills, Op.of("GivenTensorFill", [], [bad], shape=[2], values=[1.0, 2.0]))
        )
        with pytest.raises(jrnn.errors.JrnnError, match=r"cannot be stored in a \.npz"):
            jrnn.convert.write_python(Package(init, renamed), tmp_path / "bad.py")
        assert not (tmp_path / "bad.py").exists()


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, sorted(name for name, _ in attrs)))


def unsafe(text):
    return re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\ufeff]", text)


def test_no_name_becomes_markup_or_a_command_to_the_terminal():
    for names in CASES:
        net, plain = (
            model(names),
            model({f: chr(97 + FIELDS.index(f)) * len(n) for f, n in names.items()}),
        )
        image = to_svg(net, {names.get("x", "x"): ("#fff", names.get("net", "x"))})
        wanted = to_svg(plain, {plain.external_inputs[0]: ("#fff", "a")})
        assert [e.tag for e in ElementTree.fromstring(image).iter()] == [
            e.tag for e in ElementTree.fromstring(wanted).iter()
        ]
        assert Tags(image).tags == Tags(wanted).tags
        plan = Plan(
            names.get("net", "p"),
            (),
            (ExecutionStep(names.get("op", "s"), (), (names.get("net", "n"),)),),
        )
        for text, lines in (
            (show(net), len(show(plain).split("\n"))),
            (show_steps(plan), 2),
            (to_dot(net), None),
        ):
            assert not unsafe(text)
            assert lines is None or len(text.split("\n")) == lines
        quoted = re.sub(r'"(?:[^"\\]|\\.)*"', '""', to_dot(net))
        assert quoted == re.sub(r'"(?:[^"\\]|\\.)*"', '""', to_dot(plain))


def test_no_name_becomes_markup_of_the_page():
    def tags(names):
        name, blob, text = (names.get(f, f) for f in ("net", "x", "text"))
        agreement = BlobAgreement(blob, (1,), 1.0, 1.0, 1, (0,), (1.0, 2.0, 3.0), False, text)
        fault = Fault(name, text, blob, (0,), (1.0, 2.0, 3.0))
        report = GradientReport(
            1.0, (agreement,), 1e-9, 1e-6, name, (name,), {blob: 1.0}, fault, (text,)
        )
        html = page(report, Net("n"))
        assert not unsafe(html)
        return Tags(html).tags

    assert all(tags(names) == tags({}) for names in CASES)


def test_the_command_line_prints_no_control_characters(tmp_path, capsys):
    net = replace(model({f: f"\x1b[2J\r{f}" for f in FIELDS}), ops=model({}).ops[:1])
    jrnn.write_net(net, tmp_path / "net.pb")
    assert main(["show", str(tmp_path / "net.pb")]) == 0
    assert main(["run", str(tmp_path / "net.pb"), "--feed", "\x1b[2J=1"]) == 2
    assert main(["run", "\x1b[2J\udc80.pb"]) == 2
    out, err = capsys.readouterr()
    assert "\\x1b[2J\\rnet" in out and "\\x1b[2J\\udc80.pb: no such file" in err
    assert not unsafe(out + err)
