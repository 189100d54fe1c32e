"""Names in files of strangers: they never become markup, or commands to a terminal."""

import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import jrnn
from jrnn import Net
from jrnn.cli import main
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


CASES = [{field: text + " " + field for field in ("net", "x", "y")} for text in HOSTILE]
RANDOM = random.Random(0)
CASES += [{field: RANDOM.choice(HOSTILE) + " " + field for field in FIELDS} for _ in range(6)]
CASES += [
    {f: "".join(RANDOM.choices("\"'\\\n\r{}[]();#$ \0ax\x1b", k=12)) + " " + f for f in FIELDS}
    for _ in range(6)
]


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
