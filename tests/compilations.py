"""Counts what JAX compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

EVENT = "/jax/core/compile/backend_compile_duration"  # once for each program, also one that was compiled before


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list that gets an element for each program that is compiled in this context."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **more: object) -> None:
        if event == EVENT:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
