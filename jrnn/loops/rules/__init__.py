"""The rules that JAX calls when it traces, differentiates or lowers a tagged loop, one file a phase.

`jrnn.scan` is `jax.lax.scan` with a tag (`ir/tag.py`). `tracing` traces its step. When JAX differentiates a tagged loop,
the rule of `differentiation` replaces its step by one that stores less. When JAX lowers a tagged loop, forward or reverse,
the rule of `lowering` plans it for the platform (`strategies/`). A loop that cannot be planned falls back to JAX's own rule.
`installation` puts these rules in the place of JAX's.

Only these files use private names of JAX. `tests/loops/test_inside_jax.py` and `test_marked_loops.py` check them. If one is
missing, `jrnn.scan` warns once and is `jax.lax.scan`.
"""

from jrnn.loops.rules.installation import install

install()
