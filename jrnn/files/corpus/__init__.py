"""Corpora: texts as memory-mapped files of tokens, of any size; see docs/corpora.md.

In: folders of texts, and a tokenizer. Out: files of tokens, and batches of them. Read `corpus.py` first.
"""

from jrnn.files.corpus.corpus import Corpus
from jrnn.files.corpus.tokenize import tokenize

__all__ = ["Corpus", "tokenize"]
