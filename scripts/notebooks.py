"""Writes the programs of examples/ as notebooks: a cell for each top-level part of a file, and its docstring on top.

    python scripts/notebooks.py FOLDER                  writes examples/*.py as FOLDER/*.ipynb
    python scripts/notebooks.py FOLDER --run [NAME...]  also runs the cells, in a process for each notebook, keeps what
                                                        they print, and ends with status 1 if one fails

The notebooks are not in the repository: scripts/docs.sh makes them for the site.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS = {"browser_streaming": ["page"]}  # of command lines that need some


def cells_of(path: Path) -> list[dict]:
    """The cells of a program. Imports and constants that stand together share a cell; a main block loses its `if`."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    cells = [_cell("markdown", f"# {path.stem}\n\n{ast.get_docstring(tree)}")]
    parts: list[str] = []
    previous_alone = False
    for previous, node in zip(tree.body, tree.body[1:]):
        start = (
            previous.end_lineno
        )  # what stands between two parts, such as comments and decorators, belongs to the second
        text = "\n".join(lines[start : node.end_lineno]).strip("\n")
        alone = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            text = "\n".join(lines[start : node.body[0].lineno - 1]).strip("\n").rpartition("\n")[0]
            body = textwrap.dedent("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
            argv = [path.name, *ARGUMENTS.get(path.stem, [])]
            text = f"{text}\nimport sys\n\nsys.argv = {json.dumps(argv)}  # the command line\n{body}".strip(
                "\n"
            )
        if alone or not parts or previous_alone:
            parts.append(text)
        else:
            parts[-1] += "\n" * text_gap(lines, previous, node) + text
        previous_alone = alone
    return [*cells, *(_cell("code", text) for text in parts)]


def text_gap(lines: list[str], previous: ast.stmt, node: ast.stmt) -> int:
    """The number of line ends between two parts."""
    between = lines[previous.end_lineno : node.lineno - 1]
    return 1 + min(1, sum(not line.strip() for line in between))


def _cell(kind: str, text: str) -> dict:
    cell = {"cell_type": kind, "id": "", "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


def notebook(cells: list[dict]) -> dict:
    """A notebook of the format 4.5."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    named = [{**cell, "id": f"cell-{k}"} for k, cell in enumerate(cells)]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": named}


def run(cells: list[dict]) -> None:
    """Runs the code of cells in order, in one namespace, and keeps what each prints."""
    names = {"__name__": "__main__"}
    for count, cell in enumerate((c for c in cells if c["cell_type"] == "code"), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)
        cell["execution_count"] = count
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", nargs="*", metavar="NAME", help="run these, or all")
    parser.add_argument(
        "--in-place", type=Path, help=argparse.SUPPRESS
    )  # a notebook that this process runs
    args = parser.parse_args()
    if args.in_place:
        stored = json.loads(args.in_place.read_text(encoding="utf-8"))
        run(stored["cells"])
        args.in_place.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for path in sorted(EXAMPLES.glob("*.py")):
        target = (args.folder / f"{path.stem}.ipynb").resolve()
        target.write_text(json.dumps(notebook(cells_of(path)), indent=1) + "\n", encoding="utf-8")
        if args.run is None or (args.run and path.stem not in args.run):
            continue
        began, used = time.monotonic(), os.times()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder, "--in-place", target]
            done = subprocess.run(command, cwd=folder)
        failed += done.returncode != 0
        now = os.times()
        spent = now.children_user + now.children_system - used.children_user - used.children_system
        verdict = ", FAILED" if done.returncode else ""
        print(
            f"{path.stem}: {time.monotonic() - began:.0f} s, {spent:.0f} s of processor time{verdict}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
