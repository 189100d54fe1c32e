"""Tracing a marked loop: tracebacks without jrnn's frames, and a step without the mark."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

with suppress(ImportError):  # without these names tracebacks are longer, and functions may be traced twice
    from jax._src import config as private_config
    from jax._src import traceback_util


def api_boundary(fn: Callable) -> Callable:
    """The function with tracebacks that show the user's frames only, as those of `jax.lax.scan` do."""
    try:
        exclude, boundary = traceback_util.register_exclusion, traceback_util.api_boundary
    except (NameError, AttributeError):  # a version of JAX without these names: tracebacks are longer
        return fn
    exclude(os.path.dirname(os.path.dirname(__file__)))
    return boundary(fn)


class _UnmarkedStep:
    """A step that is traced with the XLA metadata from before its loop was marked. It holds the step by a weak reference."""

    def __init__(self, step: Callable, metadata: Any):
        self._step = weakref.ref(step)
        self._metadata = metadata

    @property
    def __wrapped__(self) -> Callable:
        step = self._step()
        assert step is not None, "the caller holds the step"
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # JAX's messages show the name of the step

    def __call__(self, carry: Any, x: Any) -> Any:
        state = private_config.xla_metadata_context_manager
        marked = state.swap_local(self._metadata)
        try:
            return self.__wrapped__(carry, x)
        finally:
            state.set_local(marked)


_unmarked_steps: weakref.WeakKeyDictionary[Callable, dict[Any, _UnmarkedStep]] = weakref.WeakKeyDictionary()


def unmarked_step(step: Callable) -> Callable:
    """Returns a function that traces `step` without the mark, for a loop that is about to be marked.

    JAX caches traces by function and by context, which includes the mark. Without it, a jitted function is traced once for
    calls inside and outside of a step. The result is cached by step, and the caller must keep the step alive.
    """
    try:
        metadata = private_config.xla_metadata_context_manager.get_local()
    except (NameError, AttributeError):  # a version of JAX without this name: functions may be traced twice
        return step
    try:
        made = _unmarked_steps.setdefault(step, {})
    except TypeError:  # not hashable: `jax.lax.scan` raises
        return step
    return made.setdefault(metadata, _UnmarkedStep(step, metadata))
