"""Programs of calls outside of `jax.jit`: compiled once for each step, options and shapes, as `jax.lax.scan` is.

JAX compiles a loop again when it meets a new step, and a wrapped step is new in every call. So a call is traced as a whole:
its arrays, such as `lengths`, are arguments of the program, and what the step closes over is passed to it too. JAX's cache
of traces has the trace and these arrays. It lives as long as the user's functions, and `jax.clear_caches` empties it.
Here are weak references to traces alone, by the types of the arrays, so that JAX need not look for a trace in every call.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from jrnn.jaxprs.jax_internals import are_arrays, is_staged, jaxpr_as_fun, trace_context

# `(functions, options, arrays) -> a pytree of arrays`
Run = Callable[[Sequence[Callable], Any, Any], Any]

_MOST = 64  # programs of the same functions with different options
# By trace, a closed jaxpr: its program, and the structure of what it returns.
_compiled: weakref.WeakKeyDictionary[Any, tuple[Callable, Any]] = weakref.WeakKeyDictionary()


class _Weak:
    """A function of the caller, held by a weak reference."""

    def __init__(self, function: Callable):
        self._function = weakref.ref(function)

    @property
    def __wrapped__(self) -> Callable:
        function = self._function()
        assert function is not None, "the caller holds the function"
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # JAX's messages show the name of the function

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)


class _Call:
    """A call without its arrays: the function by which JAX caches its traces."""

    def __init__(self, run: Run, functions: Sequence[Callable], options: Hashable):
        self._run = run
        self._functions = [_Weak(f) for f in functions]
        self._options = options
        # By the structure and the types of the arrays, and JAX's context.
        self.traces: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

    def __call__(self, arrays: Any) -> Any:
        return self._run(self._functions, self._options, arrays)


class _Calls:
    """The calls of the same functions: a tree with a level for each function, so that each frees what it is part of."""

    def __init__(self) -> None:
        self.of_function: weakref.WeakKeyDictionary[Callable, _Calls] = weakref.WeakKeyDictionary()
        self.of_options: OrderedDict[Hashable, _Call] = OrderedDict()


_calls = _Calls()


def _call_of(run: Run, functions: Sequence[Callable], options: Hashable) -> _Call:
    """Raises TypeError if a function or an option cannot be a key."""
    node = _calls
    for function in (run, *functions):
        inner = node.of_function.get(function)
        node = node.of_function.setdefault(function, _Calls()) if inner is None else inner
    key = options, repr(options)  # 1, 1.0 and True are equal
    call = node.of_options.pop(key, None) or _Call(run, functions, options)
    node.of_options[key] = call
    if len(node.of_options) > _MOST:
        node.of_options.popitem(last=False)
    return call


def compiled_once(run: Run, functions: Sequence[Callable], options: Any, arrays: Any) -> Any:
    """Returns `run(functions, options, arrays)`; outside of `jax.jit`, by a program that is compiled once.

    Args:
        run: a function of a module, which reads nothing else. It gets functions that hold the given ones by weak references.
        functions: the user's functions. As of those of `jax.lax.scan`, what they close over is read at the first call.
        options: what else the program depends on. If it cannot be hashed, nothing is cached.
        arrays: a pytree of arrays.
    """
    if jax.config.jax_disable_jit or is_staged():
        return run(functions, options, arrays)
    try:
        call = _call_of(run, functions, options)
        leaves, tree = jax.tree.flatten(arrays)
        types = tuple(map(jax.typeof, leaves))
        arrays_alone = are_arrays(types)
    except TypeError:  # `jax.lax.scan` reports what is no function or no array
        return run(functions, options, arrays)
    if not arrays_alone:  # such as Refs, of whose misuse `jax.lax.scan` says where they are
        return run(functions, options, arrays)
    key = tree, types, None if trace_context is None else trace_context()
    closed = None if trace_context is None else call.traces.get(key)
    if closed is None:
        closed, shape = jax.make_jaxpr(call, return_shape=True)(arrays)
        if any(getattr(jax.typeof(value), "is_high", False) for value in closed.consts):
            # A value of such a type may not be an argument of a program.
            return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(closed)(*leaves))
        call.traces[key] = closed
        if closed not in _compiled:
            _compiled[closed] = jax.jit(_evaluation(closed)), jax.tree.structure(shape)
    program, out = _compiled[closed]
    return jax.tree.unflatten(out, program(closed.consts, leaves))


def _evaluation(closed: Any) -> Callable:
    kind = type(closed)
    jaxpr = weakref.ref(closed.jaxpr)

    def scan(consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        return jaxpr_as_fun(kind(jaxpr(), consts))(*leaves)

    return scan
