"""Tracing a tagged loop: tracebacks without jrnn's frames, and a step without the tag."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from jrnn.errors import ScanError
from jrnn.jaxprs import jax_internals
from jrnn.loops.ir import StepFn, Tree

Function = Callable[..., Any]
# XLA metadata, as JAX holds it.
Metadata = Hashable


def api_boundary(fn: Function) -> Function:
    """The function with tracebacks that show the user's frames only, as `jax.lax.scan` has them."""
    return jax_internals.api_boundary(fn, os.path.dirname(os.path.dirname(__file__)))


# The metadata of all threads without tags, then with each tag; the last one holds.
_everywhere: list[Metadata] = []


def tag_everywhere(metadata: dict[str, str]) -> Callable[[], None]:
    """Adds to the XLA metadata of all threads that have no metadata of their own. Returns a function that undoes it.

    Of several, the last one that began holds, whichever is undone first.

    Raises:
        ScanError: if this version of JAX lacks a name that it needs.
    """
    try:
        before = _everywhere or [jax_internals.global_metadata()]
    except NotImplementedError as error:
        raise ScanError(
            f"optimize_scans: everywhere=True cannot be had with this version of JAX, which lacks a name ({error}); leave "
            "it out, and use the context in each thread"
        ) from error
    own = jax_internals.updated_metadata(before[-1], metadata)
    jax_internals.set_global_metadata(own)
    _everywhere[:] = [*before, own]

    def undo() -> None:
        _everywhere[:] = [other for other in _everywhere if other is not own]
        jax_internals.set_global_metadata(_everywhere[-1])
        if len(_everywhere) == 1:
            _everywhere.clear()

    return undo


class _UntaggedStep:
    """A step that is traced with the XLA metadata from before its loop was tagged. It holds the step by a weak reference.

    Two of them are equal if their steps are, so that JAX finds the trace of one for the other, as it does for the steps.
    """

    def __init__(self, step: StepFn, metadata: Metadata):
        self._step = weakref.ref(step)
        self._metadata = metadata
        self._hash = hash((step, metadata))

    @property
    def __wrapped__(self) -> StepFn:
        step = self._step()
        assert step is not None, "the caller holds the step"
        return step

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, _UntaggedStep):
            return self is other
        mine = self._step()
        theirs = other._step()
        if mine is None or theirs is None:
            return False
        return self._metadata == other._metadata and bool(mine == theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # JAX's messages show the name of the step

    def __call__(self, carry: Tree, x: Tree) -> tuple[Tree, Tree]:
        tagged = jax_internals.swap_thread_metadata(self._metadata)
        try:
            return self.__wrapped__(carry, x)
        finally:
            jax_internals.set_thread_metadata(tagged)


class _Identity(weakref.ref):
    """A weak reference that is hashed and compared by the identity of its object: equal steps have their own entries."""

    def __init__(self, step: StepFn, forget: Function | None = None):
        super().__init__(step, forget)
        self._id = id(step)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self() is not None and isinstance(other, weakref.ref) and self() is other()


_untagged_steps: dict[_Identity, dict[Metadata, _UntaggedStep]] = {}


def _forget(steps: dict[_Identity, Any], dead_reference: _Identity) -> None:
    """Is called at exit too, when the names of this module are gone."""
    steps.pop(dead_reference, None)


def untagged_step(step: StepFn) -> StepFn:
    """Returns a function that traces `step` without the tag, for a loop that is about to be tagged.

    JAX caches traces by function and by context, which includes the tag. Without it, a jitted function is traced once for
    calls inside and outside of a step. The result lives as long as the step, and the caller must keep the step alive.
    """
    if not jax_internals.can_change_metadata():
        return step
    metadata = jax_internals.thread_metadata()
    try:
        forget = functools.partial(_forget, _untagged_steps)
        by_metadata = _untagged_steps.setdefault(_Identity(step, forget), {})
        return by_metadata.setdefault(metadata, _UntaggedStep(step, metadata))
    except TypeError:  # not hashable: `jax.lax.scan` raises
        return step
