"""Operators' names stand in content alone, and not in the mechanisms that run, differentiate and write nets."""

import ast
from pathlib import Path

import jrnn
from jrnn.nets import registry

ROOT = Path(jrnn.__file__).parent
# fmt: off
MECHANISMS = (
    "errors", "loops", "nets/autodiff", "nets/builder", "nets/gradient_maker", "nets/ir", "nets/lowering", "nets/proto",
    "nets/schedule", "nn", "testing/gradients",
)
# fmt: on
WORDS = {
    "XavierFill",
    "Split",
}  # what NetBuilder.param fills with where nothing else is said; a node of plans


def texts(tree):
    """The literal texts of a file, with their lines, without docstrings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, holders) and ast.get_docstring(n) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def test_mechanisms_name_no_operator():
    types = {d.type for d in registry.registered()} - WORDS
    files = [
        path for path in ROOT.rglob("*.py") if str(path.relative_to(ROOT)).startswith(MECHANISMS)
    ]
    assert len(files) > 100
    for path in files:
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))):
            assert text not in types, (
                f"{path.relative_to(ROOT)}:{line}: names the operator {text!r}"
            )


def test_the_operators_that_autodiff_emits_exist():
    for name in (registry.ACCUMULATE, registry.SEED, registry.CONCATENATE, registry.SAVE):
        assert registry.lookup(name)
