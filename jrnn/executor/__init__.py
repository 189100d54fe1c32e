"""The recurrent executor behind `jrnn.scan`: pure JAX, it knows nothing of nets."""

from jrnn.executor.scan import scan
from jrnn.executor.while_loop import CHECKPOINTED, Trips, while_loop

__all__ = ["CHECKPOINTED", "Trips", "scan", "while_loop"]
