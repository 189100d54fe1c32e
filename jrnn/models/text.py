"""Text that a model writes, with the tokenizer of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ConfigError, DataError
from jrnn.files import kind_of, parse_json, read_json
from jrnn.files.reading import read_tokenizer
from jrnn.models.files import load_state
from jrnn.models.hub import folder_of
from jrnn.models.loading import load


def is_model(folder: str | PathLike[str]) -> bool:
    """Whether a folder holds a model, rather than a run of `jrnn train`."""
    return kind_of(Path(folder) / "config.json") != ""


def write_text(
    folder: str | PathLike[str],
    prompt: str,
    length: int,
    *,
    stop: Sequence[str] = (),
    seed: int = 0,
    first_state: str | PathLike[str] | None = None,
    **options: Any,
) -> Iterator[str]:
    """Loads a model and writes up to `length` tokens after a prompt, until its end-of-text token; piece by piece.

    Args:
        folder: as `load` takes it. Keys of generation_config.json go before keys of config.json. Without tokenizer.json the
            prompt and the text are numbers of tokens, as in "3 14 15".
        prompt: the beginning of the text, which has at least one token.
        stop: texts before whose first appearance after the prompt the text ends.
        seed: of the draws.
        first_state: a file of a state before the text; see `LanguageModel.with_first_state`.
        options: keyword arguments of `LanguageModel.stream`, such as `temperature`.

    Yields:
        The prompt and what follows it, in pieces.

    Raises:
        DataError: if the prompt has no tokens, or tokens that the model does not know.
        ConfigError, FormatError: as `load`. LayerError: if the first state is of another model.
    """
    folder = folder_of(folder)
    model = load(folder)
    if first_state is not None:
        model = model.with_first_state(load_state(first_state))
    encode, decode = _tokenizer(folder)
    tokens = encode(prompt)
    if not tokens:
        raise DataError("the prompt has no tokens; give --prompt with at least one")
    given = parse_json(model.text, f"{folder}: config.json", ConfigError, finite=False)
    if kind_of(path := folder / "generation_config.json"):
        given |= read_json(path, ConfigError, finite=False)
    ends = given.get("eos_token_id")
    ends = {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}
    start = shown = len(whole := decode(tokens))
    yield whole
    held = max(map(len, stop), default=1) - 1  # characters that may begin a text of `stop`
    for token in model.stream(jnp.array([tokens]), length, key=jax.random.key(seed), **options):
        if int(token[0]) in ends:
            break
        tokens.append(int(token[0]))
        whole = decode(tokens)
        if stops := [at for text in stop if (at := whole.find(text, start)) >= 0]:
            whole = whole[: min(stops)]
            break
        # A piece of a character is shown when the character is complete.
        if not whole.endswith("\N{REPLACEMENT CHARACTER}") and (end := len(whole) - held) > shown:
            yield whole[shown:end]
            shown = end
    yield whole[shown:]


def _tokenizer(folder: Path) -> tuple[Any, Any]:
    if not kind_of(path := folder / "tokenizer.json"):
        return _numbers, lambda tokens: " ".join(map(str, tokens))
    tokenizer = read_tokenizer(path)
    return lambda text: tokenizer.encode(text).ids, tokenizer.decode


def _numbers(text: str) -> list[int]:
    try:
        return [np.array(int(word), np.int32).item() for word in text.split()]
    except (ValueError, OverflowError):
        raise DataError(
            f"the prompt is {text!r}, but the folder has no tokenizer.json: give numbers of tokens, as in '3 14 15'"
        ) from None
