"""The kinds of tasks by name. A new kind is one file, and one line here.

In: a table `data` of a config. Out: batches, a loss and a measure. Read `task.py` first.
"""

from jrnn.train.seq2seq.seq2seq_task import SEQ2SEQ
from jrnn.train.tasks.adding import ADDING
from jrnn.train.tasks.classification import CLASSIFICATION
from jrnn.train.tasks.forecast import FORECAST
from jrnn.train.tasks.language import CHARACTERS, WORDS
from jrnn.train.tasks.task import Batch, Batches, Task, TaskKind, Trained
from jrnn.train.tasks.tokens import TOKENS

KINDS: dict[str, TaskKind] = {
    kind.name: kind
    for kind in (CHARACTERS, WORDS, TOKENS, CLASSIFICATION, ADDING, FORECAST, SEQ2SEQ)
}
