"""Draws the pictures of the documentation into docs/images: python scripts/docs_images.py [NAME...].

By default it draws those that take seconds.

    speed       training time next to other libraries, from docs/benchmarks/cpu_six.json; measures nothing
    bars        for README.md and the landing page, a few figures of docs/benchmarks, as a phone shows them
    conformance which properties hold of the layers of each library, from docs/benchmarks/layer_conformance.json
    linear      training time of layers with matrix states, from docs/benchmarks/linear.json
    filters     time of filters and simulators, from docs/benchmarks/filters.json
    scan        a loop before and after jrnn.scan rewrites it
    net         the small net of docs/caffe2.md
    losses      training and validation losses of two runs of the config `adding` (trains them, some minutes)
    attention   what a trained encoder-decoder attended to (trains it, some minutes)
    examples    what the programs of examples/ learn (trains them, some minutes)

Needs the extra `plot`.
"""

import sys
import tempfile
from pathlib import Path

import jax
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

import tables

import jrnn
from jrnn.cli import main as command
from jrnn.nets import cells
from jrnn.testing import gradients

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PEERS = {"lax.scan": "#9aa5b1", "flax": "#c3b1e1", "torch": "#f2b880", "jrnn.nn": "#2563eb"}
OURS = PEERS["jrnn.nn"]
COLORS = PEERS | {"dynamax": PEERS["lax.scan"], "JAX": "#d97706"}


def _layers(cell):
    """Peers -> times of training over those of lax.scan: of each size, and their mean."""
    ratios = tables.ratios()
    return {
        peer: [
            *ratios[cell, "train", peer].values(),
            tables.mean(ratios[cell, "train", peer].values()),
        ]
        for peer in PEERS
    }


def speed():
    """Training time over that of lax.scan, for each size and as the geometric mean."""
    sizes = [
        *(size.rpartition("x")[0] for size in tables.ratios()["lstm", "train", "torch"]),
        "mean",
    ]
    figure = Figure(figsize=(4, 5.6), layout="constrained")  # as wide as a phone shows it
    for axes, cell in zip(figure.subplots(2, 1, sharex=True), ("lstm", "gru")):
        for k, (peer, ratios) in enumerate(_layers(cell).items()):
            places = [x + 0.2 * (k - 1.5) for x in range(len(ratios))]
            axes.bar(
                places,
                [min(ratio, 2.5) for ratio in ratios],
                width=0.2,
                color=PEERS[peer],
                label=peer,
            )
            for x, ratio in zip(places, ratios):
                if ratio > 2.5:
                    axes.text(x, 2.52, f"{ratio:.1f}", ha="center", fontsize=7)
        axes.set_xticks(range(len(sizes)), sizes, rotation=30, fontsize=8)
        axes.set_title(f"{cell.upper()} layer: a training step, lax.scan = 1", fontsize=10)
        axes.axhline(1, color="#9aa5b1", linewidth=0.8)
    figure.axes[1].set_xlabel("steps x batch x features", fontsize=9)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside upper center", fontsize=9, ncols=4
    )
    figure.savefig(IMAGES / "speed.svg", metadata={"Date": None})


def bars():
    """A bar for each figure, in groups with a title. 360 wide, as a phone shows it."""
    layers = {
        cell: {peer: ratios[-1] for peer, ratios in _layers(cell).items()}
        for cell in ("lstm", "gru")
    }
    filters = _over_scan("filters", "least")
    kalman = {
        mode: filters["kalman_4", key]
        for mode, key in (("filter", "forward"), ("gradient", "train"))
    }
    filtered = ("Kalman filter, 4 states, 1,000 steps", {"lax.scan": 1, **kalman})
    title = "Matrix states, training: mean of 14"
    time, memory = (
        tables.mean(_over_scan("linear", key).values()) for key in ("low", "peak_bytes")
    )
    rows = {name: float(ratio) for name, *_, ratio in tables.read("dynamax")["rows"]}
    smoother = {"dynamax": 1, "by jrnn": rows["smoother"], "gradient": rows["smoother, gradient"]}
    lstm, gru = (
        (f"{cell.upper()} layer, training: mean of six sizes", layers[cell]) for cell in layers
    )
    _draw_bars("summary", filtered, (title, {"lax.scan": 1, "jrnn": time}), lstm, gru)
    _draw_bars("matrix", (title, {"lax.scan": 1, "time": time, "memory": memory}))
    _draw_bars("dynamax", ("Kalman smoother, 300 steps: time", smoother))
    _draw_bars("lstm", lstm)
    _draw_bars("proof", ("Gradient of h: the rule for JAX is wrong", _wrong_gradient()))


def _draw_bars(name, *groups):
    y, rows = 0, []
    for title, bars in groups:
        y += 30
        rows.append(f'<text x="8" y="{y}" font-weight="bold">{title}</text>')
        for label, value in bars.items():
            y, width = y + 26, 112 * min(value, 1.9)
            rows.append(f'<text x="88" y="{y}" text-anchor="end">{label}</text>')
            color = COLORS.get(label, OURS)
            rows.append(
                f'<rect x="96" y="{y - 14}" width="{width:.0f}" height="18" rx="3" fill="{color}"/>'
            )
            rows.append(f'<text x="{102 + width:.0f}" y="{y}">{value:.2f}</text>')
    _save(f"bars_{name}", y + 14, rows)


def _save(name, height, rows):
    size = f'viewBox="0 0 360 {height}" width="360" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="15" fill="#0f172a">'
    back = f'<rect width="360" height="{height}" fill="white"/>'
    (IMAGES / f"{name}.svg").write_text("\n".join([head, back, *rows, "</svg>"]) + "\n")


def _wrong_gradient():
    """The three gradients of the step of the landing page, whose derivative rule lacks a square."""
    soft = jax.custom_jvp(lambda x: x / (1 + abs(x)))
    soft.defjvps(lambda dx, y, x: dx / (1 + abs(x)))
    step = gradients.over_time(lambda h, x: (soft(h + x),) * 2)
    with jax.enable_x64(True):
        start = jax.numpy.zeros((1, 1)), jax.numpy.ones((3, 1, 1))
        report = gradients.check(
            gradients.subject_of_function(step, start, None, ()), gradients.Effort()
        )
    return dict(zip(("JAX", "net", "differences"), report.blobs[0].values))


def conformance():
    """Which of the fifteen properties hold of the layers of each library, as the landing page shows them."""
    table = tables.read("layer_conformance")
    heads, libraries = table["head"][1:], {}
    for names, *marks in table["rows"]:
        for name in names.split(", `"):
            library = name.strip("`").partition(".")[0]
            kept = libraries.setdefault(library, ["-"] * len(marks))
            for k, mark in enumerate(marks):
                if "no" in mark or kept[k] == "-":
                    kept[k] = mark
    rows = []
    for k, library in enumerate(libraries):
        rows.append(
            f'<text x="{164 + 34 * k}" y="62" transform="rotate(-45 {164 + 34 * k} 62)">{library}</text>'
        )
    for y, (head, *marks) in enumerate(zip(heads, *libraries.values())):
        rows.append(f'<text x="138" y="{88 + 22 * y}" text-anchor="end">{head}</text>')
        for k, mark in enumerate(marks):
            x, centre = 148 + 34 * k, 83 + 22 * y
            if "no" in mark:
                rows.append(
                    f'<rect x="{x}" y="{centre - 9}" width="30" height="18" rx="3" fill="#d97706"/>'
                )
                rows.append(
                    f'<text x="{x + 15}" y="{centre + 5}" text-anchor="middle" fill="white" font-size="13">no</text>'
                )
            elif "yes" in mark:
                rows.append(
                    f'<rect x="{x}" y="{centre - 9}" width="30" height="18" rx="3" fill="#bfdbfe"/>'
                )
    _save("conformance", 92 + 22 * len(heads), rows)


def _over_scan(name, column):
    """Loop and mode -> jrnn's number over that of lax.scan."""
    times = tables.column(name, column)
    return {
        key[:2]: value / times[*key[:2], "lax.scan", key[3]]
        for key, value in times.items()
        if key[2] == "jrnn"
    }


def linear():
    """For each layer with matrix states, the time of a training step over that of lax.scan."""
    layers, ratios = zip(*reversed(_over_scan("linear", "low").items()))
    figure = Figure(figsize=(4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(layers)), ratios, color=OURS)
    for y, ratio in enumerate(ratios):
        axes.text(ratio + 0.01, y, f"{ratio:.2f}", va="center", fontsize=9)
    axes.set_yticks(
        range(len(layers)), [layer.replace("_", " ") for layer, _ in layers], fontsize=9
    )
    axes.set_xlim(0, 1)
    axes.axvline(1, color=PEERS["lax.scan"])
    axes.set_xlabel("time of a training step, lax.scan = 1")
    figure.savefig(IMAGES / "linear.svg", metadata={"Date": None})


def filters():
    """For each loop over small states, the time forward and of a gradient over that of lax.scan."""
    ratios = _over_scan("filters", "least")
    loops = sorted({loop for loop, _ in ratios}, key=lambda loop: -ratios[loop, "train"])
    figure = Figure(figsize=(4, 6.4), layout="constrained")
    axes = figure.subplots()
    for mode, label, color, shift in (
        ("forward", "forward", PEERS["flax"], 0.2),
        ("train", "gradient", OURS, -0.2),
    ):
        places = [y + shift for y in range(len(loops))]
        axes.barh(
            places, [ratios[loop, mode] for loop in loops], height=0.4, color=color, label=label
        )
        for y, loop in zip(places, loops):
            axes.text(
                ratios[loop, mode] + 0.01, y, f"{ratios[loop, mode]:.2f}", va="center", fontsize=7
            )
    axes.set_yticks(range(len(loops)), [loop.replace("_", " ") for loop in loops], fontsize=9)
    axes.set_xlim(0, 1.2)
    axes.axvline(1, color=PEERS["lax.scan"])
    axes.set_xlabel("time, lax.scan = 1")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1.0), ncols=2, fontsize=8, frameon=False)
    figure.savefig(IMAGES / "filters.svg", metadata={"Date": None})


def scan():
    """Boxes, before above after: what is inside of the loop. 360 wide, as a phone shows it."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 680" width="360" font-family="sans-serif" font-size="14">',
        '<rect width="360" height="680" fill="white"/>',
    ]

    def box(x, y, text, color, width=220):
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="32" rx="5" fill="{color}" stroke="#64748b"/>'
        )
        parts.append(
            f'<text x="{x + width / 2}" y="{y + 21}" text-anchor="middle" fill="#0f172a">{text}</text>'
        )

    def loop(x, y, height, text, width=260):
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="none" stroke="#2563eb" stroke-width="2" '
            'stroke-dasharray="7 4"/>'
        )
        parts.append(f'<text x="{x + 10}" y="{y + 20}" fill="#2563eb">{text}</text>')

    moved, kept = "#fde68a", "#bfdbfe"
    parts.append('<text x="22" y="24" font-weight="bold">before: all work in the loop</text>')
    loop(22, 40, 270, "for each of T steps", 316)
    for k, (text, color) in enumerate(
        [
            ("x[t] @ W_in", moved),
            ("h @ W_state, tanh", kept),
            ("y[t] = h @ W_out", moved),
            ("backward: one product with W_state", kept),
            ("backward: dW_in, dW_state, dW_out", moved),
        ]
    ):
        box(34, 70 + 46 * k, text, color, 292)
    parts.append('<path d="M180 318 L180 342" stroke="#0f172a" stroke-width="2"/>')
    parts.append('<path d="M173 340 L180 354 L187 340 Z" fill="#0f172a"/>')
    parts.append(
        '<text x="22" y="380" font-weight="bold">after: what needs no carry has left</text>'
    )
    box(34, 396, "xs @ W_in, all steps at once", moved, 292)
    loop(22, 440, 116, "for each of T steps", 316)
    box(34, 468, "h @ W_state, tanh", kept, 292)
    box(34, 512, "backward: one product with W_state", kept, 292)
    box(34, 570, "ys = hs @ W_out, all steps at once", moved, 292)
    box(34, 614, "dW_in, dW_state, dW_out, once each", moved, 292)
    (IMAGES / "scan.svg").write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def net():
    """The net of docs/caffe2.md."""
    b = jrnn.NetBuilder("forecast")
    lstm = cells.LSTM(b, b.input("x"), None, None, 1, 8, "lstm")
    last = b.Squeeze(lstm.layers[-1].hidden_last, "last", dims=[0])
    b.FC([last, b.param("out_w", [1, 8]), b.param("out_b", [1], "ConstantFill", value=0.0)], "y")
    (IMAGES / "net.svg").write_text(jrnn.nets.graph.to_svg(b.build()), encoding="utf-8")


def losses():
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for cell in ("lstm", "gru"):
            runs.append(f"{folder}/adding_{cell}")
            assert (
                command(["train", "adding", "--set", f"model.cell={cell}", "--out", runs[-1]]) == 0
            )
        assert command(["plot", *runs, "--out", str(IMAGES / "losses.png")]) == 0


def attention():
    with tempfile.TemporaryDirectory() as folder:
        run, asked = f"{folder}/seq2seq_reverse", "Wednesday, 18th November 2026"
        assert command(["train", "seq2seq_reverse", "--out", run]) == 0
        assert (
            command(
                ["sample", run, "--prompt", asked, "--attention", str(IMAGES / "attention.png")]
            )
            == 0
        )


def examples():
    """For each program of docs/examples.md, a picture of what it has learned."""
    sys.path.insert(0, str(ROOT / "examples"))
    import equinox_lstm
    import finetune_pretrained
    import hmm
    import kalman
    import linear_attention
    import neural_ode
    import online_learning
    import recurrent_ppo
    import time_series

    def draw(name, x, y, lines, level=None):
        """Lines by their labels, each a list of values or two lists; `level` is a label and a value to draw across."""
        figure = Figure(figsize=(4.8, 2.6), layout="constrained")
        axes = figure.subplots()
        for (label, values), color in zip(lines.items(), ("#2563eb", "#d97706", "#64748b")):
            axes.plot(
                *(values if isinstance(values, tuple) else (values,)), color=color, label=label
            )
        if level:
            axes.axhline(level[1], color="#64748b", linestyle="--", label=level[0])
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if level or len(lines) > 1:
            axes.legend()
        figure.savefig(IMAGES / f"example_{name}.svg", metadata={"Date": None})

    _, lengths = recurrent_ppo.train(jax.random.key(0), 150)
    draw("recurrent_ppo", "update", "steps of an episode", {"": lengths})
    _, losses, best, *_ = hmm.train(300)
    draw("hmm", "step", "nats a symbol", {"learned": losses}, ("true model", best))
    std, *_ = kalman.train(200)
    positions, measured = kalman.sample(jax.random.key(9), kalman.TRUE)
    values = {
        "measured": measured[:80],
        "filtered": kalman.kalman(std, measured)[0][:80],
        "true": positions[:80],
    }
    draw("kalman", "step", "position", values)
    params, *_ = neural_ode.train(400)
    start = jax.numpy.array([[1.2, 0.5]])
    fields = {"true": (neural_ode.pendulum, None), "learned": (neural_ode.network, params)}
    paths = {
        n: tuple(neural_ode.solve(*field, start, 3 * neural_ode.SEEN)[:, 0].T)
        for n, field in fields.items()
    }
    draw("neural_ode", "angle", "velocity", paths)
    stream = online_learning.signal(20_000)
    steps = {"all earlier steps": online_learning.step, "one step": online_learning.truncated}
    errors = {
        name: online_learning.windows(online_learning.learn(step, stream)[1], 50)
        for name, step in steps.items()
    }
    draw("online_learning", "steps / 400", "squared error", errors)
    model, *_ = time_series.train(200)
    values, length = time_series.data(jax.random.key(5))
    _, forecast = model(time_series.prepared(values, length)[0], length)
    n, ahead = int(length[0]), range(int(length[0]), int(length[0]) + time_series.AHEAD)
    draw(
        "time_series",
        "step",
        "value",
        {"series": values[: n + time_series.AHEAD, 0], "forecast": (ahead, forecast[0])},
    )
    means, _ = finetune_pretrained.main()
    draw(
        "finetune_pretrained", "", "loss", {"": (["before", "last layer", "all parameters"], means)}
    )
    draw("linear_attention", "step", "right answers", linear_attention.main())
    losses = {
        name: equinox_lstm.train(150, optimized=name == "jrnn")[0] for name in ("jrnn", "lax.scan")
    }
    draw("equinox_lstm", "step", "loss", losses)


QUICK = (speed, bars, conformance, linear, filters, scan, net)
ALL = {draw.__name__: draw for draw in (*QUICK, losses, attention, examples)}

if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in ALL]
    if unknown:
        sys.exit(f"there is no picture {unknown[0]!r}; there are {', '.join(ALL)}")
    for name in sys.argv[1:] or [draw.__name__ for draw in QUICK]:
        ALL[name]()
