"""`jrnn check`: what it takes, what it prints, its page in a browser, and exit status 1 where anything disagrees."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import jrnn
from jrnn.cli import main
from jrnn.nets import registry

pytestmark = pytest.mark.usefixtures("little_optimization")

NET = """
name: "tiny"
external_input: "x" external_input: "w" external_input: "b" external_output: "y"
op { type: "FC" input: "x" input: "w" input: "b" output: "y" }
op { type: "Tanh" input: "y" output: "h" }
op { type: "AveragedLoss" input: "h" output: "loss" }
"""
INIT = """
name: "tiny_init"
external_output: "w" external_output: "b"
op { type: "XavierFill" output: "w" arg { name: "shape" ints: 4 ints: 3 } }
op { type: "ConstantFill" output: "b" arg { name: "shape" ints: 4 } arg { name: "value" f: 0.5 } }
"""
STEPS = """
import jax
import jax.numpy as jnp

w = 0.3 * jnp.eye(3)


def step(carry, x):
    h, c = carry
    h = jnp.tanh(h @ w + x)
    return (h, 0.5 * c + h), h


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def wrong(carry, x):
    h = jnp.tanh(carry + twice(x))
    return h, h


def cut(h, x):
    h = jnp.tanh(jax.lax.stop_gradient(h) @ w + x)
    return h, h


def rounded(h, x):
    x = jnp.sin(x)
    h = jnp.tanh(h @ w + x + jax.lax.stop_gradient(jnp.round(x) - x))
    return h, h


def several(h, x):
    largest = jax.lax.stop_gradient(jnp.max(x))
    x = jnp.log(jnp.sum(jnp.exp(x - largest))) + largest
    h = jnp.tanh(jax.lax.stop_gradient(h) @ w + x)
    return h, h


def unused(h, x):
    h = jnp.tanh(0 * jax.lax.stop_gradient(h) + x)
    return h, h


def shifted(h, x):
    largest = jax.lax.stop_gradient(jnp.max(x))
    h = jnp.tanh(h @ w + jnp.log(jnp.sum(jnp.exp(x - largest))) + largest)
    return h, h


def make():
    return lambda p, x: jnp.sin(x @ p["w"]), (jnp.ones((2, 3)),), {"w": jnp.ones((3, 3))}
"""
FEEDS = ["--init", "init.pbtxt", "--feed", "x=normal[2,3]"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pbtxt").write_text(NET)
    (tmp_path / "init.pbtxt").write_text(INIT)
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path


@pytest.fixture
def wrong_tanh(monkeypatch):
    right = registry.lookup("TanhGradient")
    wrong = replace(right, forward=lambda *a, **k: 2 * right.forward(*a, **k))
    monkeypatch.setitem(registry._OPS, "TanhGradient", wrong)


def report_of(capsys, *argv, status=0):
    assert main(["check", *argv, "--json", "-"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_a_net_with_its_init_net(files, capsys):
    assert main(["check", "net.pbtxt", *FEEDS]) == 0
    out = capsys.readouterr().out
    assert "\nJAX's gradient, the net's and central differences agree\nthe gradients agree\n" in out
    assert out.endswith("the gradients agree\n") and "jax - diff" in out and "verdict" not in out
    assert all(
        head.strip()
        for head in next(line for line in out.splitlines() if "blob" in line).split("┃")[1:-1]
    )
    assert {line.split()[1] for line in out.splitlines() if line.startswith("│")} == {"w", "b", "x"}


@pytest.mark.exhaustive
def test_a_wrong_gradient_is_named_and_has_status_1(files, capsys, wrong_tanh):
    assert main(["check", "net.pbtxt", *FEEDS]) == 1
    out = capsys.readouterr().out
    assert "DISAGREES" in out and "verdict" in out and out.endswith("the gradients DISAGREE\n")
    assert "\nJAX's gradient and central differences agree; the net's does not\n" in out
    fault = report_of(capsys, "net.pbtxt", *FEEDS, status=1)["fault"]
    assert (fault["operator"], fault["blob"]) == ("op #1 Tanh -> 'h' in net 'tiny'", "y")
    by_jax, by_net, difference = fault["values"]
    assert by_net == pytest.approx(2 * by_jax, rel=1e-9) and difference == pytest.approx(
        by_jax, rel=1e-6
    )


def test_a_training_net_from_a_file(files, capsys):
    net, _ = jrnn.add_gradients(jrnn.read_net(files / "net.pbtxt"), ["loss"])
    jrnn.write_net(net, files / "training.pbtxt")
    text = (files / "training.pbtxt").read_text()
    (files / "training.pbtxt").write_text(text.replace("TanhGradient", "SigmoidGradient"))
    assert main(["check", "training.pbtxt", *FEEDS, "--json", "report.json"]) == 1
    out = capsys.readouterr().out
    assert "the gradients DISAGREE" in out and "file" in out and "JAX - f" in out
    assert "first fault: op #5 SigmoidGradient" in out and "this gradient operator is wrong" in out
    fault = json.loads((files / "report.json").read_text())["fault"]
    assert fault["type"] == "SigmoidGradient" and fault["blob"] == "y_grad"


def test_packages(files, capsys):
    net = jrnn.read_net(files / "net.pbtxt")
    params = {"w": np.ones((4, 3), np.float32), "b": np.zeros(4, np.float32)}
    package = jrnn.convert.export_package(net, params, ["x"], ["h"])
    package.save("folder")
    jrnn.convert.write_predictor(package, "file.minidb", {"x": np.zeros((2, 3), np.float32)})
    for path in ("folder", "file.minidb"):
        report = report_of(capsys, path, "--feed", "x=normal[2,3]")
        assert report["agrees"] and report["outputs"] == ["h"] and report["loss"] is None
        assert {b["name"]: b["of"][:2] for b in report["blobs"]} == dict.fromkeys(
            "xwb", "h["
        )  # a Jacobian


@pytest.mark.exhaustive
def test_functions(files, capsys):
    carry = ["--feed", "carry/0=normal[2,3]", "--feed", "carry/1=normal[2,3]"]
    report = report_of(capsys, "steps.py:step", *carry, "--feed", "x=normal[4,2,3]", "--scan")
    assert report["agrees"] and {b["name"] for b in report["blobs"]} == {"carry/0", "carry/1", "x"}
    assert {b["name"] for b in report_of(capsys, "steps.py:make")["blobs"]} == {"w", "x"}


@pytest.mark.exhaustive
def test_a_wrong_rule_of_a_function_is_named(files, capsys):
    feeds = ["--feed", "carry=normal[2,3]", "--feed", "x=normal[4,2,3]"]
    fault = report_of(capsys, "steps.py:wrong", *feeds, "--scan", status=1)["fault"]
    assert fault["type"] == "scan"
    assert re.match(
        r"custom_vjp_call of twice \(steps.py:\d+:\d+ \(wrong\)\)", fault["inside"]["operator"]
    )
    assert fault["inside"]["values"][0] == pytest.approx(
        1.5 * fault["inside"]["values"][2], rel=1e-6
    )


STOPS = {  # a step, the line of it that stops what, and what is said of its gradients
    "cut": (1, "stop_gradient ({line}) cuts off the gradient of h and changes the gradient of x"),
    "rounded": (2, "stop_gradient ({line}) changes the gradient of x"),
    "several": (
        3,
        "stop_gradient ({line}) cuts off the gradient of h and changes the gradient of x",
    ),
    "unused": (1, "the gradient of h is zero for all elements (stop_gradient is called at {line})"),
    "shifted": (1, ""),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_stop_gradient_cuts_off_or_changes_is_in_the_conclusion(name, files, capsys):
    """It changes nothing in `shifted`. Of the two in `several`, only that which matters is named."""
    after, said = STOPS[name]
    line = STEPS[: STEPS.index(f"def {name}(")].count("\n") + 1 + after
    feeds = ["--scan", "--feed", "h=normal[2,3]", "--feed", "x=normal[2,2,3]", "--elements", "4"]
    assert main(["check", f"steps.py:{name}", *feeds]) == 0
    first = re.sub(r":\d+ ", " ", capsys.readouterr().out.splitlines()[0])  # without the column
    assert first == "the gradients agree" + f", but {said}".format(
        line=f"steps.py:{line} ({name})"
    ) * bool(said)


def test_mistakes(files, capsys):
    for argv, message in (
        (
            ["steps.py:step", "--feed", "x=normal[2,3]"],
            "the function's argument 'carry' is not given: --feed carry=normal[2,3]",
        ),
        (
            ["steps.py:step", "--feed", "cary=normal[2,3]"],
            "has no argument 'cary'; it takes carry, x; did you mean 'carry'?",
        ),
        (["steps.py:make", "--feed", "x=normal[2,3]"], "takes no arguments"),
        (["net.pbtxt", "--scan"], "--scan means nothing for net.pbtxt"),
        (["net.pbtxt", "--set", "a=1"], "--set means nothing for net.pbtxt"),
        (["steps.py:step", "--loss", "y"], "--loss means nothing for steps.py:step"),
    ):
        assert main(["check", *argv]) == 2
        assert message in capsys.readouterr().err


# the page -------------------------------------------------------------------------------------------------------------


def test_the_page_in_a_browser(files, capsys, wrong_tanh):
    """What a browser makes of the page, not what was written: a tag left open would show here."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    assert main(["check", "net.pbtxt", *FEEDS, "--out", "page.html"]) == 1
    text = (files / "page.html").read_text()
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", text)  # it needs no other file
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={files / 'profile'}",
        "--dump-dom",
    ]
    shown = subprocess.run(
        [browser, *flags, (files / "page.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = Page()
    page.feed(shown)
    assert page.text["verdict"] == "the gradients DISAGREE"
    assert "First fault: op #1 Tanh -> 'h' in net 'tiny'" in page.text["fault"]
    assert page.boxes == {  # by the color that a box is filled with
        "#b7e1b0": {"h", "loss"},
        "#f2a6a0": {"x", "w", "b", "y"},
        None: {"FC", "Tanh", "AveragedLoss"},
    }
    assert [row[0] for row in page.rows[1:]] == sorted(
        "xwb", key=[row[0] for row in page.rows].index
    )
    assert len(page.rows) == 4


class Page(HTMLParser):
    """The text of elements with an id, the labels of the drawn boxes by color, and the rows of the table."""

    def __init__(self):
        super().__init__()
        self.text, self.boxes, self.rows = {}, {}, []
        self.open, self.fill = [], None

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in ("meta", "br"):
            return
        self.open.append((tag, attrs.get("id")))
        if tag == "rect":
            self.fill = attrs.get("fill")
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, id = self.open[-1] if self.open else (None, None)
        if id is not None:
            self.text[id] = self.text.get(id, "") + data
        if tag == "text":
            self.boxes.setdefault(self.fill, set()).add(data)
        if tag in ("td", "th"):
            self.rows[-1].append(data)
