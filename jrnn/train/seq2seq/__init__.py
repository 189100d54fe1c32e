"""The recipe `seq2seq`: pairs of strings, an encoder-decoder with attention as one net, and beam search.

In: pairs of strings. Out: an encoder-decoder as a net, and translations. Read `seq2seq_task.py` first.
"""

from jrnn.train.seq2seq.encoder_decoder import (
    Beams,
    Seq2SeqConfig,
    Seq2SeqModel,
    beam_search,
    seq2seq,
)
from jrnn.train.seq2seq.seq2seq_task import Pairs, encode, is_held_out

__all__ = [
    "Beams",
    "Pairs",
    "Seq2SeqConfig",
    "Seq2SeqModel",
    "beam_search",
    "encode",
    "is_held_out",
    "seq2seq",
]
