"""A cache of programs for calls outside of `jax.jit`: each is compiled once, as a call of `jax.lax.scan` is.

The key of a program is the step, the options, and the types of the arrays. Its entry dies with the user's functions.

JAX compiles a loop again when it meets a new step, and a wrapped step is new in every call. So a call is traced as a whole:
its arrays, such as `lengths`, are arguments of the program, and so is what the step closes over. JAX's cache of traces holds
the trace and these arrays; it lives as long as the user's functions, and `jax.clear_caches` empties it. This module has weak
references to traces alone, by the types of the arrays, so that JAX need not look for a trace in every call.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from jrnn.jaxprs.jax_internals import (
    ClosedJaxpr,
    are_arrays,
    is_staged,
    jaxpr_as_fun,
    trace_context,
)
from jrnn.loops.ir import Tree

Function = Callable[..., Any]
# `(functions, options, arrays) -> a pytree of arrays`
Run = Callable[[Sequence[Function], Any, Tree], Tree]

MAX_PROGRAMS = 64  # of the same functions with different options
# By trace: its program, and the structure of what it returns.
_compiled: weakref.WeakKeyDictionary[ClosedJaxpr, tuple[Function, Tree]] = (
    weakref.WeakKeyDictionary()
)


class _WeakFunction:
    """A function of the caller, held by a weak reference."""

    def __init__(self, function: Function):
        self._function = weakref.ref(function)

    @property
    def __wrapped__(self) -> Function:
        function = self._function()
        assert function is not None, "the caller holds the function"
        return function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # JAX's messages show the name of the function

    def __call__(self, *args: Tree) -> Tree:
        return self.__wrapped__(*args)


class _Call:
    """A call without its arrays: the function by which JAX caches its traces."""

    def __init__(self, run: Run, functions: Sequence[Function], options: Hashable):
        self._run = run
        self._functions = list(map(_WeakFunction, functions))
        self._options = options
        # By the structure and the types of the arrays, and JAX's context.
        self.traces: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

    def __call__(self, arrays: Tree) -> Tree:
        return self._run(self._functions, self._options, arrays)


class _Calls:
    """The calls of the same functions: a tree with a level for each function, so that each frees what it is part of."""

    def __init__(self) -> None:
        self.of_function: weakref.WeakKeyDictionary[Function, _Calls] = weakref.WeakKeyDictionary()
        self.of_options: OrderedDict[Hashable, _Call] = OrderedDict()


_calls = _Calls()


def _call_of(run: Run, functions: Sequence[Function], options: Hashable) -> _Call:
    """Returns the entry of a call. Raises TypeError if a function or an option cannot be a key."""
    node = _calls
    for function in (run, *functions):
        inner = node.of_function.get(function)
        if inner is None:
            inner = node.of_function.setdefault(function, _Calls())
        node = inner
    key = options, repr(options)  # 1, 1.0 and True are equal
    call = node.of_options.pop(key, None) or _Call(run, functions, options)
    node.of_options[key] = call
    if len(node.of_options) > MAX_PROGRAMS:
        node.of_options.popitem(last=False)
    return call


def compiled_once(run: Run, functions: Sequence[Function], options: Hashable, arrays: Tree) -> Tree:
    """Returns `run(functions, options, arrays)`; outside of `jax.jit`, by a program that is compiled once.

    Args:
        run: a function of a module, which reads nothing else. It gets functions that hold the given ones by weak references.
        functions: the user's functions. What they close over is read at the first call, as `jax.lax.scan` does.
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
    except TypeError:  # `jax.lax.scan` reports arguments of wrong types
        return run(functions, options, arrays)
    if not arrays_alone:  # such as Refs, of whose misuse `jax.lax.scan` says where they are
        return run(functions, options, arrays)
    closed = None
    key = tree, types, None
    if trace_context is not None:
        key = tree, types, trace_context()
        closed = call.traces.get(key)
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


def _evaluation(closed: ClosedJaxpr) -> Function:
    """Returns the function that JAX compiles for a trace, and that does not keep the trace alive."""
    kind = type(closed)
    jaxpr = weakref.ref(closed.jaxpr)

    def scan(consts, leaves):
        return jaxpr_as_fun(kind(jaxpr(), consts))(*leaves)

    return scan
