"""write_python: a package as a Python file of plain JAX that runs without jrnn.

The file is printed from the jaxpr of the predict net, so whatever runs under `jit` can be written. Equations become
expressions of jnp and lax (convert/python_forms.py), scan, while and cond become calls with nested functions, and calls of
functions are opened. The file and the package are compared before the file counts as written.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.package import Package
from jrnn.convert.python_forms import IDENTITIES, INFIX, form_of, names_tuple, number, operands_tuple, show, typed
from jrnn.convert.verify import close, drawn
from jrnn.errors import ConversionError, OpError
from jrnn.executor.jaxprs import LOWERED_CALLS, called, is_literal, scan_counts
from jrnn.jax_names import expanded
from jrnn.lowering import to_jax

_RESERVED = (
    "jax",
    "jnp",
    "lax",
    "weights",
    "inputs",
    "blobs",
    "carry",
    "xs",
    "key",
    "predict",
    "checked",
    "load_weights",
)
# Functions with a derivative of their own that JAX has under a name.
_NAMED = {"relu": "jax.nn.relu({0})", "logaddexp": "jnp.logaddexp({0}, {1})"}
_INLINE = 60  # characters of an expression that is written where it is used
_SMALL = 16  # elements of a constant that is written into the file
_MODULE = Template('''\
"""The net $net as a function of JAX."""

import jax
import jax.numpy as jnp
from jax import lax

SHAPES = {
$shapes}


def checked(blobs):
    """The blobs as arrays, which must have the types and shapes that this file was written for."""
    for name in blobs:
        if name not in SHAPES:
            raise ValueError(f"there is no blob {name!r} to give; there are {', '.join(SHAPES)}")
    arrays = {name: jnp.asarray(blobs[name]) for name in SHAPES}
    for name, array in arrays.items():
        if (str(array.dtype), array.shape) != SHAPES[name]:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; this file was written for {SHAPES[name]}")
    return arrays


def predict(weights, inputs$key):
    blobs = checked({**weights, **inputs})
$body


def load_weights(path=__file__.removesuffix(".py") + ".npz"):
    import numpy as np

    with np.load(path) as arrays:
        return {name: jnp.asarray(arrays[name]) for name in arrays}


if __name__ == "__main__":
    print($inputs)
    print("a value for any of these may be among the inputs too:")
    for name, value in load_weights().items():
        print(f"  {name} {value.dtype}{list(value.shape)}")
''')


def to_python(
    package: Package, examples: Mapping[str, Any] | None = None, *, seed: int = 0
) -> tuple[str, dict[str, np.ndarray]]:
    """The source of a Python module that computes what a package computes, and the arrays that it reads.

    Args:
        package: the package.
        examples: arrays, or shapes with dtypes, of the inputs whose shapes the package does not know. The module computes
            for arrays of these shapes, and raises ValueError for others.
        seed: of the weights that the init net draws at random.

    Returns:
        The source and the weights. Its function is `predict(weights, inputs) -> outputs` of dicts of arrays by blob, with a
        third parameter `key` where the net draws random numbers; `load_weights()` reads the weights from the `.npz` next to
        the module.

    Raises:
        ConversionError: an input whose shape is not known, or a primitive that has no public name in JAX.
        OpError: a net that does not run under `jit`, because a shape in it depends on the values of blobs.

    >>> from jrnn.ir import Net, Op
    >>> net = Net("double", (Op.of("Add", ["x", "x"], ["y"]), Op.of("Tanh", ["y"], ["z"])), ("x",), ("z",))
    >>> source, weights = to_python(Package(Net("init"), net), {"x": np.ones(3, np.float32)})
    >>> print(source[source.index("def predict"):source.index("def load")].strip())
    def predict(weights, inputs):
        blobs = checked({**weights, **inputs})
        x = blobs['x']
        return {'z': jnp.tanh(x + x)}
    """
    filled = package.filled(key=jax.random.key(seed))
    specs = _specs(package, examples or {}, filled)
    made = {n: np.asarray(v) for n, v in filled.items() if n not in specs}
    weights = {
        n: v.astype(jax.dtypes.canonicalize_dtype(v.dtype)) if v.dtype.kind in "iuf" else v for n, v in made.items()
    }
    try:
        closed, names, fixed = _traced(package, specs, weights, ())
    except OpError:  # a shape may stand in a weight, which must then be a constant
        closed, names, fixed = _traced(package, specs, weights, [n for n, v in weights.items() if v.dtype.kind in "iu"])
    printer = _Printer()
    reads = [printer.fresh(n) for n in names]
    found = printer.walk(closed, [*reads, "key"])
    outputs = ", ".join(f"{_quoted(n)}: {{{k}}}" for k, n in enumerate(package.output_names))
    lines, free = _live([*printer.lines, _Line((), f"return {{{{{outputs}}}}}", tuple(found))], set())
    named = {**dict(zip(names, reads)), **{n: n for n in printer.arrays}}
    lines = [*(_Line((v,), f"blobs[{_quoted(n)}]") for n, v in named.items() if v in free), *lines]
    own = {
        n: np.asarray(filled[n], s.dtype) for n, s in specs.items() if n in filled and np.shape(filled[n]) == s.shape
    }
    loaded = own | {n: v for n, v in weights.items() if n not in fixed} | printer.arrays
    source = _MODULE.substitute(
        net=repr(package.predict_net.name),
        shapes="".join(f"    {n!r}: {(str(v.dtype), tuple(v.shape))!r},\n" for n, v in {**specs, **loaded}.items()),
        key=", key" if "key" in free else "",
        body="\n".join(_render(lines, _uses(lines), 1)),
        inputs=repr(f"inputs {', '.join(specs)}; outputs {', '.join(package.output_names)}"),
    )
    return source, loaded


def write_python(
    package: Package, path: str | Path, examples: Mapping[str, Any] | None = None, *, seed: int = 0
) -> None:
    """Writes a package as `path`, a Python file, and its weights next to it as a `.npz` of the same name.

    The file can be run as a script, which lists inputs and weights. Args and errors are those of `to_python`; besides:

    Raises:
        ConversionError: the file computes other numbers than the package, on the examples or on random numbers.
    """
    path = Path(path)
    source, arrays = to_python(package, examples, seed=seed)
    weights = package.filled(key=jax.random.key(seed))
    module: dict[str, Any] = {"__file__": str(path), "__name__": path.stem}
    exec(compile(source, str(path), "exec"), module)
    rng, key = np.random.default_rng(0), jax.random.key(0)
    specs = _specs(package, examples or {}, weights)
    given = {n: np.asarray(drawn(rng, (examples or {}).get(n, s)), s.dtype) for n, s in specs.items()}
    more = (key,) if "key" in inspect.signature(module["predict"]).parameters else ()
    with jax.default_matmul_precision("highest"):
        run = to_jax(package.predict_net, package.output_names)
        wanted = jax.jit(lambda given, key: run({**weights, **given}, key=key))(given, key)
        found = jax.jit(module["predict"])(arrays, given, *more)
    bad = [n for n in package.output_names if not close(found[n], wanted[n])]
    if bad:
        raise ConversionError(f"the Python file gives other numbers than the net for {', '.join(map(repr, bad))}")
    path.write_text(source)
    np.savez(path.with_suffix(".npz"), **arrays)


def _specs(package: Package, examples: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """The shape and type of each input: as given, as known, or those of the example that the init net holds."""
    examples = {**{n: filled[n] for n in package.inputs if np.size(filled.get(n, 0)) > 1}, **examples}
    package.check_known(examples)
    found = {}
    for name in dict.fromkeys((*package.inputs, *examples)):
        if name in examples:
            array = examples[name] if hasattr(examples[name], "dtype") else np.asarray(examples[name])
            found[name] = jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        elif name in package.shapes:
            found[name] = package.shapes[name]
        else:
            raise ConversionError(
                f"the shape of input {name!r} is not known; give an example of it, as in --feed {name}=normal[2,3]"
            )
    return found


def _traced(
    package: Package, specs: Mapping[str, Any], weights: Mapping[str, np.ndarray], baked: Iterable[str]
) -> tuple[Any, list[str], set[str]]:
    """The jaxpr of the predict net, the names of its inputs, and the weights that stand in it as constants."""
    fixed = {n: v for n, v in weights.items() if n in baked or v.dtype.kind in "OSU"}
    free = {**specs, **{n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in weights.items() if n not in fixed}}
    run, names = to_jax(package.predict_net, package.output_names), list(free)

    def fn(*args: Any) -> list[Any]:
        found = run({**fixed, **dict(zip(names, args))}, key=args[-1])
        return [found[n] for n in package.output_names]

    closed = jax.make_jaxpr(fn)(*free.values(), jax.random.key(0))
    return closed, names, set(fixed)


class _Constant(NamedTuple):
    """A number that is written where it is used."""

    value: Any
    dtype: Any


_Operand = Any  # str, a name | _Constant


@dataclass(frozen=True)
class _Line:
    """`shown = text`, where `{0}`, `{1}`, ... of the text are the operands; a function, where there is a body."""

    targets: tuple[str, ...]
    text: str
    operands: tuple[_Operand, ...] = ()
    shown: str = ""
    body: tuple[_Line, ...] | None = None


class _Printer:
    """Turns jaxprs into lines. `arrays` are the constants that are too large to be written into the file."""

    def __init__(self) -> None:
        self.lines: list[_Line] = []
        self.arrays: dict[str, np.ndarray] = {}
        self._used = set(_RESERVED)
        self._scope = ""

    def fresh(self, hint: str) -> str:
        """A name that is not in use."""
        base = re.sub(r"\W+", "_", hint).strip("_") or "blob"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = "b_" + base
        name, k = base, 1
        while name in self._used:
            name, k = f"{base}_{k}", k + 1
        self._used.add(name)
        return name

    def walk(self, closed: Any, operands: Sequence[_Operand]) -> list[_Operand]:
        """Adds the lines of a jaxpr; returns what its outputs are called."""
        jaxpr = getattr(closed, "jaxpr", closed)
        env: dict[Any, _Operand] = {
            v: self._constant(c) for v, c in zip(jaxpr.constvars, getattr(closed, "consts", ()))
        }
        env.update(zip(jaxpr.invars, operands))

        def read(atom: Any) -> _Operand:
            return _Constant(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            scope = self._scope
            self._scope = re.sub(r"\W", "_", str(eqn.source_info.name_stack).rpartition("/")[2]).lower() or scope
            env.update(zip(eqn.outvars, self._equation(eqn, [read(a) for a in eqn.invars])))
            self._scope = scope
        return [read(a) for a in jaxpr.outvars]

    def _constant(self, value: Any) -> _Operand:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value))
            return self._add("jax.random.wrap_key_data({0})", [self._constant(data)], "constant")
        value = np.asarray(value)
        if not value.shape:
            return _Constant(value[()], value.dtype)
        if value.size and (value == value.flat[0]).all():
            return self._add(f"jnp.full({show(value.shape)}, {typed(value.flat[0], value.dtype)})", [], "constant")
        if value.size <= _SMALL:
            numbers = ", ".join(map(number, value.reshape(-1)))
            reshaped = f".reshape({show(value.shape)})" if value.ndim > 1 else ""
            return self._add(f"jnp.array([{numbers}], {show(value.dtype)}){reshaped}", [], "constant")
        name = self.fresh("constant")
        self.arrays[name] = value
        return name

    def _add(self, text: str, operands: Sequence[_Operand], hint: str) -> str:
        name = self.fresh(hint)
        self.lines.append(_Line((name,), text, tuple(operands)))
        return name

    def _equation(self, eqn: Any, operands: list[_Operand]) -> Sequence[_Operand]:
        name, hint = eqn.primitive.name, self._scope or eqn.primitive.name
        if name in IDENTITIES:
            return operands
        if name == "convert_element_type" and eqn.params["new_dtype"] == eqn.invars[0].aval.dtype:
            return operands
        body = called(eqn, LOWERED_CALLS)
        body = expanded(eqn) if body is None else body
        if body is not None:
            text = _NAMED.get(_name_of(body)) if name == "custom_jvp_call" else None
            return [self._add(text, operands, hint)] if text else self.walk(body, operands)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, operands, hint)
        if name in INFIX and not all(isinstance(x, _Constant) for x in operands):  # a number takes the other's type
            operands = [number(x.value) if isinstance(x, _Constant) else x for x in operands]
        targets = tuple(self.fresh(hint) for _ in eqn.outvars)
        shown = names_tuple(targets) if eqn.primitive.multiple_results else ""
        self.lines.append(_Line(targets, form_of(eqn), tuple(operands), shown))
        return targets

    def _function(
        self, hint: str, closed: Any, operands: Sequence[_Operand], groups: Mapping[str, Sequence[str]]
    ) -> str:
        """Adds a function of `groups`, tuples of names; returns its name. Its other operands are the names around it."""
        name = self.fresh(hint)
        outer, self.lines = self.lines, [_Line(tuple(g), p, (), names_tuple(g)) for p, g in groups.items() if g]
        found = self.walk(closed, operands)
        carried = len(groups["carry"]) if "xs" in groups else len(found)
        text = operands_tuple(0, carried) + (f", {operands_tuple(carried, len(found))}" if "xs" in groups else "")
        lines = (*self.lines, _Line((), "return {0}" if hint == "condition" else f"return {text}", tuple(found)))
        self.lines = outer
        self.lines.append(_Line((name,), f"def {name}({', '.join(groups)}):", (), body=lines))
        return name

    def _scan(self, eqn: Any, operands: list[_Operand], hint: str) -> Sequence[_Operand]:
        consts, carries = scan_counts(eqn.params)
        carry, xs = (
            [self.fresh(h) for _ in range(n)] for h, n in (("h", carries), ("x", len(operands) - consts - carries))
        )
        step = self._function(
            "step", eqn.params["jaxpr"], [*operands[:consts], *carry, *xs], {"carry": carry, "xs": xs}
        )
        targets = tuple(self.fresh(hint) for _ in eqn.outvars)
        given = operands[consts:]
        sequences = operands_tuple(carries, len(given)) if xs else "None"
        options = "".join(f", {k}={eqn.params[k]}" for k in ("length", "reverse") if eqn.params[k])
        text = f"lax.scan({step}, {operands_tuple(0, carries)}, {sequences}{options})"
        shown = f"{names_tuple(targets[:carries])}, {names_tuple(targets[carries:])}"
        self.lines.append(_Line(targets, text, (*given, step), shown))
        return targets

    def _while(self, eqn: Any, operands: list[_Operand], hint: str) -> Sequence[_Operand]:
        p = eqn.params
        first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        functions = []
        for kind, closed, consts in (
            ("condition", p["cond_jaxpr"], operands[:first]),
            ("loop_body", p["body_jaxpr"], operands[first:second]),
        ):
            carry = [self.fresh("h") for _ in operands[second:]]
            functions.append(self._function(kind, closed, [*consts, *carry], {"carry": carry}))
        targets = tuple(self.fresh(hint) for _ in eqn.outvars)
        text = f"lax.while_loop({', '.join(functions)}, {operands_tuple(0, len(operands) - second)})"
        self.lines.append(_Line(targets, text, (*operands[second:], *functions), names_tuple(targets)))
        return targets

    def _cond(self, eqn: Any, operands: list[_Operand], hint: str) -> Sequence[_Operand]:
        functions = [self._function("branch", b, operands[1:], {}) for b in eqn.params["branches"]]
        targets = tuple(self.fresh(hint) for _ in eqn.outvars)
        text = f"lax.switch({{0}}, {names_tuple(functions)})"
        self.lines.append(_Line(targets, text, (operands[0], *functions), names_tuple(targets)))
        return targets


def _name_of(body: Any) -> str:
    """The name of the function that a jaxpr was traced from."""
    return str(getattr(body, "jaxpr", body).debug_info.func_name)


def _quoted(name: str) -> str:
    """A blob's name as Python, in a format string."""
    return repr(name).replace("{", "{{").replace("}", "}}")


def _live(lines: Iterable[_Line], wanted: set[str]) -> tuple[list[_Line], set[str]]:
    """The lines that compute what is wanted or returned, and the names that they read from around them."""
    kept, wanted = [], set(wanted)
    for line in reversed(list(lines)):
        if line.targets and not wanted.intersection(line.targets):
            continue
        wanted -= set(line.targets)
        wanted.update(x for x in line.operands if isinstance(x, str))
        if line.body is not None:
            body, free = _live(line.body, set())
            line = replace(line, body=tuple(body))
            wanted |= free
        kept.append(line)
    return kept[::-1], wanted


def _uses(lines: Iterable[_Line]) -> Counter[str]:
    """How often each name is read where it was made; once more than that where a function within reads it."""
    found: Counter[str] = Counter()
    for line in lines:
        found.update(x for x in line.operands if isinstance(x, str))
        if line.body is not None:
            inner = _uses(line.body)
            made = {t for at in line.body for t in at.targets}
            found.update({n: count + (n not in made) for n, count in inner.items()})
    return found


def _render(lines: Iterable[_Line], uses: Mapping[str, int], depth: int) -> Iterator[str]:
    """Python lines; a short expression that is used once stands where it is used."""
    pending: dict[str, str] = {}
    indent = "    " * depth
    for line in lines:
        if line.body is not None:
            yield ""
            yield indent + line.text
            yield from _render(line.body, uses, depth + 1)
            yield ""
            continue
        text = line.text.format(*(_shown(x, pending, line.text) for x in line.operands))
        text = re.sub(r"\.reshape\(\([\d, ]*\)\)(?=\.reshape\()", "", text)
        if not line.targets:
            yield indent + text
        elif not line.shown and uses[line.targets[0]] == 1 and len(text) <= _INLINE:
            pending[line.targets[0]] = text
        else:
            yield f"{indent}{line.shown or line.targets[0]} = {text}"


def _shown(operand: _Operand, pending: Mapping[str, str], text: str) -> str:
    if isinstance(operand, _Constant):
        return typed(operand.value, operand.dtype)
    found = pending.get(operand, operand)
    binds = text.startswith(("{0}", "-", "~")) or "({0}.reshape" in text
    return f"({found})" if binds and _is_loose(found) else found


def _is_loose(text: str) -> bool:
    """Whether an expression has an operator outside of all brackets."""
    depth = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c == " ":
            return True
    return text.startswith(("-", "~"))
