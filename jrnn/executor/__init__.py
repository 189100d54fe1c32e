"""The recurrent executor behind `jrnn.scan`: pure JAX, it knows nothing of nets."""

from jrnn.executor.explain import Explanation, explain_scan
from jrnn.executor.lstm_step import LstmStep
from jrnn.executor.scan import as_written, scan
from jrnn.executor.while_loop import CHECKPOINTED, Trips, while_loop

__all__ = ["CHECKPOINTED", "Explanation", "LstmStep", "Trips", "as_written", "explain_scan", "scan", "while_loop"]
