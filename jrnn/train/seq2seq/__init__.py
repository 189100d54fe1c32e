"""The recipe `seq2seq`: pairs of strings, an encoder-decoder with attention as one net, and beam search."""

from jrnn.train.seq2seq.beam import Beams, beam_search
from jrnn.train.seq2seq.model import Seq2SeqConfig, Seq2SeqModel, seq2seq
from jrnn.train.seq2seq.pairs import Pairs, encode, is_held_out

__all__ = ["Beams", "Pairs", "Seq2SeqConfig", "Seq2SeqModel", "beam_search", "encode", "is_held_out", "seq2seq"]
