"""A loop as one call of a compiled kernel for CPUs.

In: a `Loop`. Out: one custom call of XLA with an encoded program. Read `steps.py` first.

It runs steps of products with constant matrices, elementwise operations and reductions, of rows that do not depend on each
other. `steps` turns a step into `operations` on views, `stages` orders them, `encoder` encodes them, and `program` says what
the kernel gets, and what is computed before and after the call. `runner` calls it, and counts what a call runs;
`costs/kernel_calls.py` has its cost. `library` finds the object, if it was built. `src/` is the kernel, in C++.

Loops over few numbers whose carry is affine have a call of their own: `affine_step` reads the step, `affine_program`
encodes it, and `affine_call` runs it.
"""

from __future__ import annotations

from jrnn.loops.ir import Loop, Unsupported

__all__ = ["NAME", "refusal"]

NAME = "native"


def refusal(loop: Loop) -> str | None:
    """Returns the reason why a loop cannot be a call of the kernel, or None."""
    from jrnn.loops.kernels.native import library
    from jrnn.loops.kernels.native.program import program_of

    try:
        library.require()
        program_of(loop)
    except Unsupported as why:
        return str(why)
    return None
