"""Pretrained recurrent language models, in the files of the Hugging Face hub; see docs/pretrained.md.

In: a folder of the hub: config.json, weights, tokenizer. Out: a `LanguageModel`, its logits and texts. Read `model.py`
first.
"""

from jrnn.models.families import FAMILIES
from jrnn.models.files import load_state, save_state
from jrnn.models.loading import create, load
from jrnn.models.model import LanguageModel

__all__ = ["FAMILIES", "LanguageModel", "create", "load", "load_state", "save_state"]
