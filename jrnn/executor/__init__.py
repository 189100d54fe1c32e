"""The recurrent executor behind `jrnn.scan`: pure JAX, it knows nothing of nets."""

from jrnn.executor.scan import scan

__all__ = ["scan"]
