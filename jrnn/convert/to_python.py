"""write_python: a package as a Python file of plain JAX that runs without jrnn.

The file is printed from the jaxpr of the predict net, so whatever runs under `jit` can be written. Equations become
expressions of jnp and lax (convert/python_forms.py), scan, while and cond become calls with nested functions, and other
calls are inlined. The file is only written if it computes what the package computes.

The package may come from a stranger. Its names reach the file as literals (`literal`, `show`) or as the letters, digits and
underscores of variables (`_Printer.fresh`), so they never become code.
"""

from __future__ import annotations

import hashlib
import inspect
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.export import npz_of, put_module
from jrnn.convert.package import Package
from jrnn.convert.python_forms import (
    IDENTITIES,
    INFIX,
    Constant,
    Line,
    Operand,
    form_of,
    literal,
    live_lines,
    names_tuple,
    number,
    operands_tuple,
    render,
    show,
    typed,
    uses_of,
)
from jrnn.errors import ConversionError, OpError, printable
from jrnn.jaxprs import Eqn, is_literal, scan_counts
from jrnn.jaxprs.flat import body_of
from jrnn.jaxprs.jax_internals import function_name, scopes
from jrnn.jaxprs.trials import close, drawn
from jrnn.nets.lowering import to_jax

_RESERVED = (
    "jax", "jnp", "lax", "weights", "inputs", "blobs", "carry", "xs", "key", "predict", "checked", "load_weights",
)  # fmt: skip
# Functions with a custom derivative that JAX has a name for.
_NAMED = {"relu": "jax.nn.relu({0})", "logaddexp": "jnp.logaddexp({0}, {1})"}
_PLAIN = re.compile(r"[\w./-]*", re.ASCII)  # names of blobs that may stand inside an expression
_LONGEST = 60  # characters of a variable's name
_SMALL = 16  # most elements of a constant that is written into the file
_MODULE = Template('''\
$title

import jax
import jax.numpy as jnp
from jax import lax

SHAPES = {
$shapes}


def checked(blobs):
    """The blobs as arrays, which must have the types and shapes that this file was written for."""
    for name in blobs:
        if name not in SHAPES:
            raise ValueError(f"{name!r} is no input; the inputs are {', '.join(map(repr, SHAPES))}")
    arrays = {name: jnp.asarray(blobs[name]) for name in SHAPES}
    for name, array in arrays.items():
        if (str(array.dtype), array.shape) != SHAPES[name]:
            raise ValueError(f"{name!r} is {array.dtype}{list(array.shape)}; this file was written for {SHAPES[name]}")
    return arrays


def predict(weights, inputs$key):
    blobs = checked({**weights, **inputs})
$body


def load_weights(path=__file__.removesuffix(".py") + "$ending"):
    import numpy as np

    with np.load(path) as arrays:
        return {name: jnp.asarray(arrays[name]) for name in arrays}


if __name__ == "__main__":
    print($inputs)
    print("inputs may also replace these weights:")
    for name, value in load_weights().items():
        print(f"  {name!r} {value.dtype}{list(value.shape)}")
''')


def to_python(
    package: Package, examples: Mapping[str, Any] | None = None, *, seed: int = 0
) -> tuple[str, dict[str, np.ndarray]]:
    """The source of a Python module that computes what a package computes, and the arrays that it reads.

    Args:
        package: the package.
        examples: arrays, or shapes with dtypes, of the inputs whose shapes the package does not know. The module accepts
            arrays of these shapes, and raises ValueError for others.
        seed: the seed of weights that the init net draws at random.

    Returns:
        The source and the weights. The module's function is `predict(weights, inputs) -> outputs` of dicts of arrays by
        blob, with a third parameter `key` if the net draws random numbers. `load_weights(path)` reads the weights from a
        `.npz`, by default the one next to the module.

    Raises:
        ConversionError: an input whose shape is not known, or a primitive that has no public name in JAX.
        OpError: a net that does not run under `jit`, because a shape depends on the values of blobs.

    >>> from jrnn.nets.ir import Net, Op
    >>> net = Net("double", (Op.of("Add", ["x", "x"], ["y"]), Op.of("Tanh", ["y"], ["z"])), ("x",), ("z",))
    >>> source, weights = to_python(Package(Net("init"), net), {"x": np.ones(3, np.float32)})
    >>> print(source[source.index("def predict"):source.index("def load")].strip())
    def predict(weights, inputs):
        blobs = checked({**weights, **inputs})
        x = blobs['x']
        return {'z': jnp.tanh(x + x)}
    """
    parts, arrays = _module_of(package, examples, seed)
    return _MODULE.substitute(parts, ending=".npz"), arrays


def _module_of(
    package: Package, examples: Mapping[str, Any] | None, seed: int
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The parts of the module's source, and its weights; raises as `to_python`."""
    filled = package.filled(key=jax.random.key(seed))
    specs = _specs(package, examples or {}, filled)
    arrays = {n: np.asarray(v) for n, v in filled.items() if n not in specs}
    weights = {
        n: v.astype(jax.dtypes.canonicalize_dtype(v.dtype)) if v.dtype.kind in "iuf" else v
        for n, v in arrays.items()
    }
    try:
        closed, names, fixed = _traced(package, specs, weights, ())
    except OpError:  # a shape may depend on a weight, which must then be a constant
        closed, names, fixed = _traced(
            package, specs, weights, [n for n, v in weights.items() if v.dtype.kind in "iu"]
        )
    printer = _Printer()
    reads = [printer.fresh(n) for n in names]
    results = printer.walk(closed, [*reads, "key"])
    outputs = ", ".join(f"{show(n)}: {{{k}}}" for k, n in enumerate(package.output_names))
    lines, free = live_lines(
        [*printer.lines, Line((), f"return {{{{{outputs}}}}}", tuple(results))], set()
    )
    named = {**dict(zip(names, reads)), **{n: n for n in printer.arrays}}
    read = (
        Line((v,), f"blobs[{show(n)}]", shown="" if _PLAIN.fullmatch(n) else v)
        for n, v in named.items()
        if v in free
    )
    lines = [*read, *lines]
    own = {
        n: np.asarray(filled[n], s.dtype)
        for n, s in specs.items()
        if n in filled and np.shape(filled[n]) == s.shape
    }
    loaded = own | {n: v for n, v in weights.items() if n not in fixed} | printer.arrays
    parts = dict(
        title=literal(f"The net {package.predict_net.name!r} as a function of JAX."),
        shapes="".join(
            f"    {literal(n)}: {(str(v.dtype), tuple(v.shape))!r},\n"
            for n, v in {**specs, **loaded}.items()
        ),
        key=", key" if "key" in free else "",
        body="\n".join(render(lines, uses_of(lines), 1)),
        inputs=literal(
            printable(f"inputs {', '.join(specs)}; outputs {', '.join(package.output_names)}")
        ),
    )
    return parts, loaded


def write_python(
    package: Package, path: str | Path, examples: Mapping[str, Any] | None = None, *, seed: int = 0
) -> None:
    """Writes a package as `path`, a Python file, and its weights next to it as a `.npz`.

    `model.py` reads `model-DIGEST.npz`, whose name has 12 digits of the SHA-256 of its bytes. So both are replaced in one
    step, that of the Python file. Earlier weights of `model.py` are removed afterwards. Run as a script, the file lists its
    inputs and weights. Takes the arguments of `to_python`.

    Raises:
        ConversionError: as `to_python` does, and if the file computes other numbers than the package.
        OpError: as `to_python` does.
    """
    path = Path(path)
    parts, arrays = _module_of(package, examples, seed)
    data = npz_of(arrays)
    ending = f"-{hashlib.sha256(data).hexdigest()[:12]}.npz"
    source = _MODULE.substitute(parts, ending=ending)
    weights = package.filled(key=jax.random.key(seed))
    module: dict[str, Any] = {"__file__": str(path), "__name__": path.stem}
    exec(
        compile(source, ascii(str(path)), "exec"), module
    )  # JAX passes the name to C++, which takes UTF-8 only
    examples = examples or {}
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    specs = _specs(package, examples, weights)
    given = {n: np.asarray(drawn(rng, examples.get(n, s)), s.dtype) for n, s in specs.items()}
    more = (key,) if "key" in inspect.signature(module["predict"]).parameters else ()
    with jax.default_matmul_precision("highest"):
        run = to_jax(package.predict_net, package.output_names)
        wanted = jax.jit(lambda given, key: run({**weights, **given}, key=key))(given, key)
        outs = jax.jit(module["predict"])(arrays, given, *more)
    bad = [n for n in package.output_names if not close(outs[n], wanted[n])]
    if bad:
        raise ConversionError(
            f"the Python file computes other numbers than the net for {', '.join(map(repr, bad))}"
        )
    put_module(path, source.encode(), data, ending)


def _specs(
    package: Package, examples: Mapping[str, Any], filled: Mapping[str, Any]
) -> dict[str, Any]:
    """The shape and type of each input: of the example given, or in the init net, or as the package knows it."""
    inputs = package.inputs
    examples = {**{n: filled[n] for n in inputs if np.size(filled.get(n, 0)) > 1}, **examples}
    package.check_known(examples)
    types = {}
    for name in dict.fromkeys((*inputs, *examples)):
        if name in examples:
            array = (
                examples[name] if hasattr(examples[name], "dtype") else np.asarray(examples[name])
            )
            types[name] = jax.ShapeDtypeStruct(
                array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
            )
        elif name in package.shapes:
            types[name] = package.shapes[name]
        else:
            raise ConversionError(
                f"the shape of input {name!r} is not known; give an example of it, as in --feed {name}=normal[2,3]"
            )
    return types


def _traced(
    package: Package,
    specs: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    baked: Iterable[str],
) -> tuple[Any, list[str], set[str]]:
    """The jaxpr of the predict net, the names of its inputs, and the weights that are constants in it."""
    fixed = {n: v for n, v in weights.items() if n in baked or v.dtype.kind in "OSU"}
    free = {
        **specs,
        **{n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in weights.items() if n not in fixed},
    }
    run = to_jax(package.predict_net, package.output_names)
    names = list(free)

    def fn(*args: Any) -> list[Any]:
        blobs = run({**fixed, **dict(zip(names, args))}, key=args[-1])
        return [blobs[n] for n in package.output_names]

    closed = jax.make_jaxpr(fn)(*free.values(), jax.random.key(0))
    return closed, names, set(fixed)


class _Printer:
    """Turns jaxprs into lines. `arrays` are the constants that are too large for the source."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.arrays: dict[str, np.ndarray] = {}
        self._used = set(_RESERVED)
        self._scope = ""

    def fresh(self, hint: str) -> str:
        """A name that is not in use."""
        base = re.sub(r"\W+", "_", hint, flags=re.ASCII)[:_LONGEST].strip("_") or "blob"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = "b_" + base
        name = base
        k = 1
        while name in self._used:
            name = f"{base}_{k}"
            k = k + 1
        self._used.add(name)
        return name

    def walk(self, closed: Any, operands: Sequence[Operand]) -> list[Operand]:
        """Adds the lines of a jaxpr and returns its outputs."""
        jaxpr = getattr(closed, "jaxpr", closed)
        env: dict[Any, Operand] = {
            v: self._constant(c) for v, c in zip(jaxpr.constvars, getattr(closed, "consts", ()))
        }
        env.update(zip(jaxpr.invars, operands))

        def read(atom: Any) -> Operand:
            return Constant(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            scope = self._scope
            self._scope = re.sub(r"\W", "_", (scopes(eqn) or [""])[-1]).lower() or scope
            env.update(zip(eqn.outvars, self._equation(eqn, [read(a) for a in eqn.invars])))
            self._scope = scope
        return [read(a) for a in jaxpr.outvars]

    def _constant(self, value: Any) -> Operand:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(value))
            return self._add("jax.random.wrap_key_data({0})", [self._constant(data)], "constant")
        value = np.asarray(value)
        if not value.shape:
            return Constant(value[()], value.dtype)
        if value.size and (value == value.flat[0]).all():
            return self._add(
                f"jnp.full({show(value.shape)}, {typed(value.flat[0], value.dtype)})",
                [],
                "constant",
            )
        if value.size <= _SMALL:
            numbers = ", ".join(map(number, value.reshape(-1)))
            reshaped = f".reshape({show(value.shape)})" if value.ndim > 1 else ""
            return self._add(
                f"jnp.array([{numbers}], {show(value.dtype)}){reshaped}", [], "constant"
            )
        name = self.fresh("constant")
        self.arrays[name] = value
        return name

    def _add(self, text: str, operands: Sequence[Operand], hint: str) -> str:
        name = self.fresh(hint)
        self.lines.append(Line((name,), text, tuple(operands)))
        return name

    def _equation(self, eqn: Eqn, operands: list[Operand]) -> Sequence[Operand]:
        name = eqn.primitive.name
        hint = self._scope or eqn.primitive.name
        if name in IDENTITIES:
            return operands
        if name == "convert_element_type" and eqn.params["new_dtype"] == eqn.invars[0].aval.dtype:
            return operands
        if (body := body_of(eqn)) is not None:
            function = function_name(getattr(body, "jaxpr", body))
            text = _NAMED.get(function) if name == "custom_jvp_call" else None
            return [self._add(text, operands, hint)] if text else self.walk(body, operands)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, operands, hint)
        if name in INFIX and not all(
            isinstance(x, Constant) for x in operands
        ):  # a number takes the other's type
            operands = [number(x.value) if isinstance(x, Constant) else x for x in operands]
        return self._results(eqn, hint, form_of(eqn), operands)

    def _results(
        self,
        eqn: Eqn,
        hint: str,
        text: str,
        operands: Sequence[Operand],
        carries: int | None = None,
    ) -> Sequence[Operand]:
        """Adds the line of an equation and returns its results; the first `carries` are a tuple of their own."""
        targets = tuple(self.fresh(hint) for _ in eqn.outvars)
        parts = [targets] if carries is None else [targets[:carries], targets[carries:]]
        shown = ", ".join(map(names_tuple, parts)) if eqn.primitive.multiple_results else ""
        self.lines.append(Line(targets, text, tuple(operands), shown))
        return targets

    def _function(
        self, hint: str, closed: Any, outer: Sequence[Operand], groups: Mapping[str, Sequence[str]]
    ) -> str:
        """Adds a nested function and returns its name.

        Args:
            hint: the name; a "condition" returns one value, not a tuple.
            closed: the jaxpr.
            outer: its first operands, which the function reads from the scope around it.
            groups: parameter -> the names that this tuple is unpacked to, which are the other operands.
        """
        name = self.fresh(hint)
        before = self.lines
        self.lines = [Line(tuple(g), p, (), names_tuple(g)) for p, g in groups.items() if g]
        results = self.walk(closed, [*outer, *(n for g in groups.values() for n in g)])
        carried = len(groups["carry"]) if "xs" in groups else len(results)
        text = operands_tuple(0, carried) + (
            f", {operands_tuple(carried, len(results))}" if "xs" in groups else ""
        )
        lines = (
            *self.lines,
            Line((), f"return {'{0}' if hint == 'condition' else text}", tuple(results)),
        )
        self.lines = [*before, Line((name,), f"def {name}({', '.join(groups)}):", (), body=lines)]
        return name

    def _scan(self, eqn: Eqn, operands: list[Operand], hint: str) -> Sequence[Operand]:
        consts, carries = scan_counts(eqn.params)
        given = operands[consts:]
        names = [self.fresh("h" if k < carries else "x") for k in range(len(given))]
        groups = {"carry": names[:carries], "xs": names[carries:]}
        step = self._function("step", eqn.params["jaxpr"], operands[:consts], groups)
        sequences = operands_tuple(carries, len(given)) if len(given) > carries else "None"
        options = "".join(f", {k}={eqn.params[k]}" for k in ("length", "reverse") if eqn.params[k])
        text = f"lax.scan({step}, {operands_tuple(0, carries)}, {sequences}{options})"
        return self._results(eqn, hint, text, (*given, step), carries)

    def _while(self, eqn: Eqn, operands: list[Operand], hint: str) -> Sequence[Operand]:
        p = eqn.params
        first = p["cond_nconsts"]
        second = p["cond_nconsts"] + p["body_nconsts"]
        carry = operands[second:]
        functions = []
        for kind, closed, consts in (
            ("condition", p["cond_jaxpr"], operands[:first]),
            ("loop_body", p["body_jaxpr"], operands[first:second]),
        ):
            functions.append(
                self._function(kind, closed, consts, {"carry": [self.fresh("h") for _ in carry]})
            )
        text = f"lax.while_loop({', '.join(functions)}, {operands_tuple(0, len(carry))})"
        return self._results(eqn, hint, text, (*carry, *functions))

    def _cond(self, eqn: Eqn, operands: list[Operand], hint: str) -> Sequence[Operand]:
        functions = [self._function("branch", b, operands[1:], {}) for b in eqn.params["branches"]]
        return self._results(
            eqn, hint, f"lax.switch({{0}}, {names_tuple(functions)})", (operands[0], *functions)
        )
