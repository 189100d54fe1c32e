"""What `jrnn check` names, as subjects: JAX functions, NetDefs, packages, and `MODULE:FUNCTION`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path

from jrnn.convert import example_of, load_function, load_package
from jrnn.convert.from_jax import ConvertedPackage, convert
from jrnn.errors import ConversionError, FormatError, GradientError
from jrnn.jaxprs import Eqn, all_equations, bind, interpreted, jaxpr_of, scan_parts
from jrnn.jaxprs.arguments import Call, arguments_of, call_of, path_of, required
from jrnn.jaxprs.flat import body_of
from jrnn.nets.autodiff import add_gradients
from jrnn.nets.ir import Net, Values
from jrnn.nets.lowering import run_net
from jrnn.nets.proto import read_net
from jrnn.testing.gradients.held import holding
from jrnn.testing.gradients.report import Blobs
from jrnn.testing.gradients.subject import Subject, as_float64, seeds_of, subject_of_net

LOSS = "loss"
MOST_STEPS = 64  # of a scan that is unrolled; a longer one stays one operator


def subject_of_function(
    fn: Callable, args: Sequence[Any], params: Any = None, surrogates: Collection[str] = ()
) -> Subject:
    """A function at a point; its net is what `from_jax` converts it to. To be called with 64-bit types enabled.

    Args:
        fn, args, params: as for `from_jax`. The function is differentiated with respect to args and params, but not to
            arrays that it closes over. This is done in float64, so its types must follow its arguments' types. Complex
            arguments and results count as two arrays, `z/real` and `z/imag`. If no net can have the function's gradient,
            the subject says why.
        surrogates: names of functions inside `fn` whose custom derivative rule is a surrogate on purpose.

    Raises:
        ConversionError: for arguments that are not arrays, and a function without results.
        GradientError: a function that does not run in float64.
    """
    with jax.enable_x64(False):
        args, params = jax.tree.map(_as_float32, (tuple(args), params))
        call = call_of(fn, args, params)
        converted: ConvertedPackage | str
        if surrogates:
            converted = (
                f"a net has the derivative of {', '.join(surrogates)}, not the surrogate gradient"
            )
        else:
            converted = _converted(replace(call, run=unrolled(call.run)))
    if isinstance(converted, str):
        names = _distinct([leaf.name for leaf in call.leaves])
        results = None
    else:
        package = converted.package
        names = [leaf.name for leaf in call.leaves if leaf.is_param] + list(package.input_names)
        results = list(package.output_names)
    values = {}
    for name, leaf in zip(names, call.leaves, strict=True):
        values.update(_parts(name, as_float64(leaf.value)))
    fixed = {}
    point = {}
    for name, value in values.items():
        if value.dtype == np.float64:
            point[name] = value
        else:
            fixed[name] = value

    def function(point: Blobs) -> Values:
        given = jax.tree.map(jnp.asarray, fixed) | dict(point)
        tree = call.run([_joined(name, given) for name in names])
        leaves = tree_flatten_with_path(tree)[0]
        ends = results or _distinct([path_of("output", path) for path, _ in leaves])
        outputs: Values = {}
        for end, (_, leaf) in zip(ends, leaves, strict=True):
            outputs.update(_parts(end, leaf))
        return outputs

    try:
        shapes = jax.eval_shape(function, point)
    except (TypeError, ValueError) as e:
        raise GradientError(
            f"{call.name} does not run in float64: {str(e).splitlines()[0]}; gradients are compared in float64: let types "
            "follow the arguments' types, as in jnp.zeros(n, x.dtype)"
        ) from e
    seeds = seeds_of(call.name, shapes, point)

    def smooth(point: Blobs) -> Values:
        """The outputs that have a gradient."""
        outputs = function(point)
        return {y: outputs[y] for y in outputs if y in seeds}

    reason = converted if isinstance(converted, str) else _missing_gradient(converted, seeds)
    s = Subject(Net(call.name), values, tuple(point), seeds, smooth, exact=False, no_net=reason)
    if surrogates:
        held = holding(smooth, s.point, surrogates)
        if held is None:
            raise GradientError(
                f"{call.name} calls no function {' or '.join(map(repr, surrogates))} with a derivative rule of its own; "
                "surrogates are the names of functions with jax.custom_jvp or jax.custom_vjp"
            )
        return replace(s, held=held, surrogates=tuple(surrogates))
    if isinstance(converted, str) or reason is not None:
        return s
    net, constants = _without_constants(converted.package.predict_net)
    blobs = {
        n: as_float64(v) for n, v in {**converted.package.weights(), **constants}.items()
    } | values
    return replace(s, net=net, blobs=blobs)


def _converted(call: Call) -> ConvertedPackage | str:
    """The conversion of a function, or in one line why there is none."""
    try:
        return convert(call)
    except ConversionError as e:
        first, *reasons = (line.strip() for line in str(e).splitlines())
        more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        return (reasons[0] if reasons else first) + more


def _missing_gradient(converted: ConvertedPackage, seeds: Blobs) -> str | None:
    """Why the net has no backward pass, in one line; None if it has one."""
    if converted.without_gradient:
        return converted.without_gradient[0]
    try:
        add_gradients(converted.package.predict_net, dict.fromkeys(seeds))
    except GradientError as e:
        where = next(
            (converted.origins[o] for o in e.outputs if o in converted.origins),
            converted.package.predict_net.name,
        )
        return f"{where}: {e}"
    return None


def _distinct(names: Sequence[str]) -> list[str]:
    """The names; a name that was used before gets a number."""
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        distinct.append(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return distinct


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """A value under its name, or the real and imaginary part of a complex one."""
    if not jnp.issubdtype(value.dtype, jnp.complexfloating):
        return [(name, value)]
    return [(f"{name}/real", value.real), (f"{name}/imag", value.imag)]


def _joined(name: str, values: Blobs) -> Any:
    if name in values:
        return values[name]
    return jax.lax.complex(values[f"{name}/real"], values[f"{name}/imag"])


def _without_constants(net: Net) -> tuple[Net, Values]:
    """The net without the operators that fill floats, and the float32 values that these fill."""
    constants = run_net(Net("constants", tuple(op for op in net.ops if not op.inputs)), {})
    floats = {}
    for n, v in constants.items():
        if isinstance(v, np.ndarray) and v.dtype.kind == "f":
            floats[n] = v
    return replace(
        net, ops=tuple(op for op in net.ops if op.inputs or not floats.keys() >= set(op.outputs))
    ), floats


def _as_float32(value: Any) -> Any:
    if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value  # a random key
    value = np.asarray(value)
    return value.astype({"f": np.float32, "c": np.complex64}.get(value.dtype.kind, value.dtype))


def subject_of_file(
    path: str, feeds: Blobs, loss: str | None, *, init: str | None, key: Any
) -> Subject:
    """A NetDef with its init net, or a package: a folder, or a file of Caffe2's predictor exporter.

    Args:
        feeds: blobs that no init net fills.
        loss: defaults to `loss` if the net writes such a blob, else to all outputs.

    Raises:
        FormatError: for a file that is neither.
        GradientError, NetError, OpError: as `subject_of_net` does.
    """
    net, blobs = _read(path, init, key)
    if loss is None and any(LOSS in op.outputs for op in net.ops):
        loss = LOSS
    return subject_of_net(net, {**blobs, **feeds}, loss, key=key)


def _read(path: str, init: str | None, key: Any) -> tuple[Net, Values]:
    if init is not None or not Path(path).is_dir():
        try:
            return read_net(Path(path)), {} if init is None else run_net(
                read_net(Path(init)), {}, key=key
            )
        except FormatError as e:
            not_a_net = e
        try:
            package = load_package(path)
        except FormatError:
            raise not_a_net from None
    else:
        package = load_package(path)
    return package.predict_net, package.filled(key=key)


def subject_of_target(target: str, feeds: Blobs, *, scanned: bool) -> Subject:
    """The function that `MODULE:FUNCTION` names.

    Args:
        target: a function of arrays, which are in `feeds`, or a function without arguments that returns `(fn, args)` or
            `(fn, args, params)`.
        feeds: arrays by name.
        scanned: whether the function is a step `(..., carry, x) -> (carry, y)`, which is run over sequences.

    Raises:
        ConversionError: a function that does not exist or convert.
        GradientError: arguments that are not given.
    """
    params = None
    with jax.enable_x64(False):  # the user's module makes arrays of JAX's default types
        fn = load_function(target)
        if required(fn):
            args = tuple(arguments_of(fn, feeds))
        elif feeds:
            raise GradientError(
                f"{target} takes no arguments: what it returns is checked; it was given {', '.join(feeds)}"
            )
        else:
            fn, args, params = example_of(target, fn())
    return subject_of_function(over_time(fn) if scanned else fn, args, params)


def over_time(step: Callable) -> Callable:
    """A step `(..., carry, x) -> (carry, y)` as a function of sequences [T, ...], over which the last argument scans."""

    def scanned(*args: Any) -> Any:
        *weights, carry, xs = args
        return jax.lax.scan(lambda c, x: step(*weights, c, x), carry, xs)

    scanned.__name__ = getattr(step, "__name__", "step").strip("<>")
    scanned.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    return scanned


def unrolled(run: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function of a sequence of arrays whose scans over while loops are unrolled.

    In a net, the gradient of a While needs the values of every trip. A RecurrentNetwork is one compiled loop, which cannot
    hold them if data decides the number of trips. So a check converts the steps of such a scan one after the other.
    """

    def steps(values: Sequence[Any]) -> Any:
        closed, out = jax.make_jaxpr(run, return_shape=True)(list(values))
        if not any(map(_is_scan_of_loops, all_equations(closed.jaxpr))):
            return run(values)
        return jax.tree.unflatten(
            jax.tree.structure(out), _evaluated(closed, jax.tree.leaves(list(values)))
        )

    return steps


def _is_scan_of_loops(eqn: Eqn) -> bool:
    if eqn.primitive.name != "scan" or eqn.params["length"] > MOST_STEPS:
        return False
    for inner in all_equations(jaxpr_of(eqn.params["jaxpr"])):
        if inner.primitive.name == "while":
            return True
    return False


def _evaluated(closed: Any, args: Sequence[Any]) -> list[Any]:
    return interpreted(closed, args, _results_unrolled)


def _results_unrolled(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
    if _is_scan_of_loops(eqn):
        return _step_by_step(eqn, values)
    body = body_of(eqn)
    if body is not None and any(map(_is_scan_of_loops, all_equations(jaxpr_of(body)))):
        return _evaluated(body, values)
    return bind(eqn, *values)


def _step_by_step(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    p = eqn.params
    consts, carry, stacks = scan_parts(p, values)
    count = len(carry)
    order = range(p["length"])[::-1] if p["reverse"] else range(p["length"])
    rows: dict[int, list[Any]] = {}
    for t in order:
        outs = _evaluated(p["jaxpr"], [*consts, *carry, *(stack[t] for stack in stacks)])
        carry = outs[:count]
        rows[t] = outs[count:]
    return [*carry, *map(jnp.stack, zip(*(rows[t] for t in range(p["length"]))))]
