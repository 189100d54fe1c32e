"""The package does not grow, and stays written out: nodes of its syntax trees, and nodes a line of code.

Lines are free, and nodes are what costs: who adds nodes takes others away."""

import ast
import io
import tokenize
from pathlib import Path

import jrnn

NODES = 660_300
NODES_PER_LINE = 10.5
PACKED_PER_1000_LINES = 0.3
COMPREHENSIONS_PER_1000_LINES = 34
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree):
    """The lines of all docstrings."""
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(text, tree):
    """The lines of code: without blank lines, comments and docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(tree)


def is_packed(node):
    """Whether a statement assigns several values to several targets: `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def test_the_package_does_not_grow_and_is_written_out():
    nodes = lines = packed = comprehensions = 0
    for path in Path(jrnn.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        walked = list(ast.walk(tree))
        nodes += len(walked)
        lines += len(code_lines(text, tree))
        packed += sum(map(is_packed, walked))
        comprehensions += sum(isinstance(node, COMPREHENSIONS) for node in walked)
    assert nodes <= NODES
    assert nodes / lines <= NODES_PER_LINE
    assert 1000 * packed / lines <= PACKED_PER_1000_LINES
    assert 1000 * comprehensions / lines <= COMPREHENSIONS_PER_1000_LINES
