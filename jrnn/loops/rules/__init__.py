"""The rules that JAX calls when it traces, differentiates or lowers a tagged loop, one file a phase.

In: tagged scan equations, as JAX transforms them. Out: what JAX puts in their place. Read `lowering.py` first.

`jrnn.scan` is `jax.lax.scan` with a tag (`ir/tag.py`). `tracing` traces its step. When JAX differentiates a tagged loop,
the rule of `differentiation` replaces its step by one that stores less. When JAX lowers a tagged loop, forward or reverse,
the rule of `lowering` plans it for the platform (`strategies/`). A loop that cannot be planned falls back to JAX's own rule.
`installation` puts these rules in the place of JAX's.

They get JAX's private names from `jaxprs/jax_internals.py`. If one is missing, jrnn warns once, and `jrnn.scan` is
`jax.lax.scan`. If a rule raises what it should not, JAX's own runs, and the log `jrnn.loops` has a warning.
"""

from jrnn.loops.rules.installation import check as check
from jrnn.loops.rules.installation import install

install()
