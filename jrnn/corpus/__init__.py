"""Corpora: texts as memory-mapped files of tokens, of any size; see docs/corpora.md."""

from jrnn.corpus.corpus import Corpus
from jrnn.corpus.tokenize import tokenize

__all__ = ["Corpus", "tokenize"]
