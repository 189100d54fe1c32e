"""Tables of recorded figures, which docs/generated.py writes where a page has a part `measured: NAME`.

Each is made from docs/benchmarks/NAME.json: the records of `jrnn bench --json` or `scripts/benchmarks`, or a head and rows
that a script of scripts/record wrote, or that were copied from what a command printed.
"""

import ast
import json
import math
from pathlib import Path

FOLDER = Path(__file__).parent / "benchmarks"
EXAMPLES = Path(__file__).parents[1] / "examples"


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name, table):
    """Writes a table of rows of text: a line for each row and note."""
    lists = {
        key: ",\n".join(f"  {json.dumps(row)}" for row in table[key])
        for key in ("rows", "notes")
        if key in table
    }
    fields = [
        f" {json.dumps(k)}: " + (f"[\n{lists[k]}\n ]" if k in lists else json.dumps(v))
        for k, v in table.items()
    ]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


def column(name, key):
    """A column of the records: cell, mode, peer and size -> its number."""
    return {(r["cell"], r["mode"], r["peer"], r["size"]): r[key] for r in read(name)["records"]}


def mean(ratios):
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def ratios():
    """Cell, mode and peer of the six sizes -> times over those of lax.scan, by size."""
    times = column("cpu_six", "least")
    sizes = dict.fromkeys(size for *_, size in times)
    keys = dict.fromkeys(key[:3] for key in times)
    return {
        key: {s: times[*key, s] / times[*key[:2], "lax.scan", s] for s in sizes} for key in keys
    }


def cpu_six():
    names = {"jrnn": "`jrnn.scan`", "jrnn.nn": "`jrnn.nn`", "torch": "torch"}
    by_program = ratios()
    sizes = [size.rpartition("x")[0] for size in next(iter(by_program.values()))]
    rows = [
        [
            f"{cell.upper()} {mode}, {name}",
            *(f"{x:.2f}" for x in (mean(by_size.values()), *by_size.values())),
        ]
        for cell in ("lstm", "gru")
        for mode in ("forward", "train")
        for peer, name in names.items()
        for by_size in [by_program[cell, mode, peer]]
    ]
    return {"head": ["", "mean of six", *sizes], "rows": rows}


def linear():
    times, memory, compilation = (
        column("linear", kind) for kind in ("low", "peak_bytes", "compile_seconds")
    )
    rows = []
    for cell, mode, size in dict.fromkeys((cell, mode, size) for cell, mode, _, size in times):
        pair = [(cell, mode, peer, size) for peer in ("jrnn", "lax.scan")]
        ours, theirs = (1e3 * times[key] for key in pair)
        megabytes = " / ".join(f"{memory[key] / 1e6:.0f}" for key in pair)
        seconds = " / ".join(f"{compilation[key]:.1f}" for key in pair)
        rows.append(
            [f"`{cell}`", f"{ours:.0f} / {theirs:.0f}", f"{ours / theirs:.2f}", megabytes, seconds]
        )
    return {"head": ["layer", "train, ms", "ratio", "train, MB", "compilation, s"], "rows": rows}


def filters():
    times = column("filters", "least")
    rows = []
    for cell, size in dict.fromkeys((cell, size) for cell, _, _, size in times):
        columns = [
            (cell, mode, peer, size)
            for mode in ("forward", "train")
            for peer in ("lax.scan", "jrnn")
        ]
        rows.append([f"`{cell}`", *(f"{1e6 * times[key] / int(size):.2f}" for key in columns)])
    rows.sort(key=lambda row: -float(row[1]))
    head = [
        "loop",
        "forward, `lax.scan`",
        "forward, jrnn",
        "gradient, `lax.scan`",
        "gradient, jrnn",
    ]
    return {"head": head, "rows": rows}


def tiny():
    times = column("tiny", "least")
    rows = []
    for cell, size in dict.fromkeys((cell, size) for cell, _, _, size in times):
        row = [f"`{cell}`"]
        for mode in ("forward", "train"):
            theirs, ours = (times[cell, mode, peer, size] for peer in ("lax.scan", "jrnn"))
            row += [
                f"{1e9 * theirs / int(size):.1f}",
                f"{1e9 * ours / int(size):.1f}",
                f"{ours / theirs:.2f}",
            ]
        rows.append(row)
    head = [
        f"{mode}, {what}"
        for mode in ("forward", "gradient")
        for what in ("`lax.scan`", "jrnn", "ratio")
    ]
    return {"head": ["loop", *head], "rows": rows}


def carries():
    """Microseconds of loops by the size of their carry."""
    times = column("carries", "least")
    rows = []
    for cell, mode in dict.fromkeys((cell, mode) for cell, mode, _, _ in times):
        row = [f"`{cell}`", "gradient" if mode == "train" else mode]
        for size in ("1024", "65536"):
            theirs, ours = (times[cell, mode, peer, size] for peer in ("lax.scan", "jrnn"))
            row += [f"{1e6 * theirs:.0f}", f"{1e6 * ours:.0f}"]
        rows.append(row)
    columns = [f"{size}, {peer}" for size in ("1,024", "65,536") for peer in ("`lax.scan`", "jrnn")]
    return {"head": ["loop", "mode", *columns], "rows": rows}


def peers():
    """Time of jrnn over that of numba, scipy, C and `lax.scan`, float32."""
    times = column("peers", "least")
    rows = []
    for cell in dict.fromkeys(cell for cell, _, _, _ in times):
        ours = times[cell, "forward", "jrnn", "float32"]
        row = [f"`{cell}`", f"{1e6 * ours:.0f}"]
        for peer in ("numba", "scipy", "C", "lax.scan"):
            theirs = times.get((cell, "forward", peer, "float32"))
            row.append("-" if theirs is None else f"{ours / theirs:.2f}")
        gradient, reference = (times[cell, "train", p, "float32"] for p in ("jrnn", "lax.scan"))
        rows.append([*row, f"{1e6 * gradient:.0f}", f"{gradient / reference:.2f}"])
    head = ["loop", "jrnn, us", "over numba", "over scipy", "over C", "over `lax.scan`"]
    return {"head": [*head, "gradient, us", "over `lax.scan`"], "rows": rows}


def world():
    """Programs of other libraries: milliseconds plain and by jrnn, and their ratios, forward and with the gradient."""
    rows = {}
    for record in read("world")["records"]:
        library, _, program = record["program"].partition("_")
        row = rows.setdefault((library, program), [f"{library}: {program}", *["-"] * 4])
        at = 1 if record["mode"] == "forward" else 3
        row[at : at + 2] = (
            f"{record['plain'] * 1e3:.2f}",
            f"{record['marked'] / record['plain']:.2f}",
        )
    return {
        "head": ["program", "forward, ms", "by jrnn", "gradient, ms", "by jrnn"],
        "rows": list(rows.values()),
    }


def programs():
    """The programs of examples/: what they say of themselves, and the seconds of processor time of their notebooks."""
    rows = []
    for name, seconds in read("notebooks")["rows"]:
        text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
        about = " ".join(text.partition("\n\n")[0].split())
        rows.append([f"[{name}](../examples/{name}.py)", about, seconds, f"`{name}.ipynb`"])
    return {"head": ["program", "what it is", "seconds", "notebook"], "rows": rows}


def on_h200(part, *calls):
    """The timed programs of a part of the accelerator day: job -> peer -> record."""
    jobs = {}
    for record in read("h200")["records"]:
        if record["part"] == part and "seconds" in record and record["call"] in calls:
            jobs.setdefault(record["job"], {})[record["peer"]] = record
    return jobs


def h200_cells():
    peers = {"lax.scan": "`lax.scan`", "flax": "flax", "torch": "torch (cuDNN)"}
    rows = []
    for job, times in on_h200("lstm", 1).items():
        cell, mode, size, *precision = job.split()
        over = (
            f"{times['jrnn']['seconds'] / times[p]['seconds']:.2f}" if p in times else "-"
            for p in peers
        )
        name = f"{cell.upper()} {mode}, {size}{', float32' if precision else ''}"
        rows.append([name, f"{times['jrnn']['us_a_step']:.1f}", *over])
    return {
        "head": ["program", "jrnn, us a step", *(f"over {name}" for name in peers.values())],
        "rows": rows,
    }


def h200_layers():
    runs = on_h200("matrix", 2) | {
        job: t for job, t in on_h200("matrix", 1).items() if job.endswith("highest")
    }
    rows = []
    for job, times in runs.items():
        layer, mode, *_ = job.split()
        ours, theirs = times["jrnn"], times["lax.scan"]
        by_hand = times.get("by hand")
        rows.append([
            f"`{layer}` {mode}",
            *(f"{1e3 * t['seconds']:.2f}" for t in (ours, theirs)),
            f"{ours['seconds'] / theirs['seconds']:.3f}",
            f"{ours['seconds'] / by_hand['seconds']:.2f}" if by_hand else "-",
            f"{ours['temporary'] / 1e6:.0f} / {theirs['temporary'] / 1e6:.0f}",
        ])  # fmt: skip
    head = [
        "layer",
        "jrnn, ms",
        "`lax.scan`, ms",
        "over `lax.scan`",
        "over chunks by hand",
        "temporary MB",
    ]
    return {"head": head, "rows": rows}


def h200_chunks():
    rows = []
    for job, times in on_h200("chunks", 2).items():
        for peer, label in (("chunks of ", "jrnn"), ("by hand, ", "by hand, TF32")):
            each = [
                f"{1e3 * times[f'{peer}{size}']['seconds']:.2f}"
                for size in (32, 64, 128)
                if f"{peer}{size}" in times
            ]
            rows += [[f"`{job.split()[0]}` train, {label}", *each]] if each else []
    return {"head": ["layer", "32 steps, ms", "64 steps, ms", "128 steps, ms"], "rows": rows}


def h200_errors():
    """The largest errors of jrnn on the device, next to those of `lax.scan` there."""
    groups = {
        "matrix states": "matrix ",
        "`jrnn.nn`": "nn ",
        'a cell by `executor="associative"`': "associative",
        'a cell by `executor="newton"`': "newton",
        "other cells": "",
    }
    of_group = {name: [] for name in groups}
    for r in read("h200")["records"]:
        if "error" in r and "cudnn" not in r["job"]:
            of_group[next(name for name, text in groups.items() if text in r["job"])].append(r)
    columns = ("error", "lax_scan", "gradient_error", "lax_scan_gradient")
    rows = [
        [
            name,
            str(len({r["job"] for r in records})),
            *(f"{max(r[c] for r in records):.1e}" for c in columns),
        ]
        for name, records in of_group.items()
    ]
    head = [
        "programs",
        "number",
        "values, jrnn",
        "values, `lax.scan`",
        "gradients, jrnn",
        "gradients, `lax.scan`",
    ]
    return {"head": head, "rows": rows}


MADE = {
    "cpu_six": cpu_six,
    "linear": linear,
    "filters": filters,
    "tiny": tiny,
    "carries": carries,
    "peers": peers,
    "world": world,
    "programs": programs,
}
MADE |= {made.__name__: made for made in (h200_cells, h200_layers, h200_chunks, h200_errors)}


def render(name):
    """A table in Markdown, and what its record says around it."""
    table = MADE[name]() if name in MADE else read(name)
    cells = [table["head"], ["---"] * len(table["head"]), *table["rows"]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    if "conditions" in table:
        lines = [table["conditions"], "", *lines]
    if "notes" in table:
        lines += ["", "What does not hold:", "", *(f"- {note}" for note in table["notes"])]
    return "\n".join(lines)
