"""Beam search: the most probable sequences of a model that predicts the next token from the previous ones.

Shapes: N examples, K beams, V tokens known, T tokens at most, the one that ends a sequence among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

State = Any


class Beams(NamedTuple):
    """Hypotheses, the best of each example first.

    Attributes:
        tokens: int32 [N, K, T]; `end` after the end of each hypothesis.
        lengths: int32 [N, K], the number of tokens with `end`; T if the hypothesis was cut off.
        log_probability: float [N, K], of the whole hypothesis.
        score: log_probability divided by length ** normalization; -inf if there are fewer than K hypotheses.
        finished: bool [N, K], whether `end` was reached.
    """

    tokens: Any
    lengths: Any
    log_probability: Any
    score: Any
    finished: Any


def beam_search(
    step: Callable[[State, Any], tuple[Any, State]],
    state: State,
    first: Any,
    *,
    end: int,
    steps: int,
    width: int = 4,
    normalization: float = 1.0,
) -> Beams:
    """Searches for the sequences of greatest score, keeping the K best prefixes of every example; jit it.

    Finished hypotheses stay among the K while they are better than unfinished ones. K = 1 is greedy search; K equal to the
    number of all sequences is an exhaustive search.

    Args:
        step: `(state, tokens) -> (logits, state)`, from the state of N K hypotheses and their last tokens, int32 [N K], to
            the logits of the next tokens [N K, V] and the next state.
        state: the state of the N examples before the first step: a pytree of arrays with the examples on axis 1, as in the
            states [1, N, H] of recurrent networks.
        first: int32 [N], the tokens that the first step reads.
        end: the token that ends a sequence.
        steps: T.
        width: K, the number of hypotheses that are kept; 1 is greedy search.
        normalization: hypotheses are compared by log probability / length ** normalization, where the length includes
            `end`: 0 favors short hypotheses, 1 compares means over the tokens.

    Returns:
        K hypotheses for each example.

    Source: Graves 2012, Sequence transduction with recurrent neural networks; Wu et al. 2016, section 7, for the lengths.

    >>> table = jnp.log(jnp.array([[0.1, 0.5, 0.4], [0.2, 0.4, 0.4], [0.9, 0.05, 0.05]]))  # of the next token, by the last
    >>> search = lambda width: beam_search(
    ...     lambda state, last: (table[last], state), (), jnp.zeros(1, int), end=0, steps=4, width=width, normalization=0.0
    ... )
    >>> search(1).tokens[0, 0].tolist(), search(2).tokens[0, 0].tolist()  # greedy starts with the likeliest token
    ([1, 1, 1, 1], [2, 0, 0, 0])
    """
    n, k = first.shape[0], width

    def scores(log_probability: Any, lengths: Any) -> Any:
        return log_probability / lengths.astype(log_probability.dtype) ** normalization

    def go_on(loop: tuple[Any, Beams, State]) -> Any:
        t, beams, _ = loop
        return (t < steps) & ~jnp.all(beams.finished | jnp.isneginf(beams.score))

    def body(loop: tuple[Any, Beams, State]) -> tuple[Any, Beams, State]:
        t, beams, state = loop
        before = lax.dynamic_index_in_dim(beams.tokens, jnp.maximum(t - 1, 0), 2, keepdims=False)  # [N, K]
        last = jnp.where(t == 0, jnp.broadcast_to(first[:, None], (n, k)), before)
        logits, state = step(state, last.reshape(-1).astype(jnp.int32))
        vocabulary = logits.shape[-1]
        next_ = jax.nn.log_softmax(logits.reshape(n, k, vocabulary))
        stay = jnp.where(jnp.arange(vocabulary) == end, 0.0, -jnp.inf).astype(next_.dtype)
        next_ = jnp.where(beams.finished[..., None], stay, next_)  # a finished hypothesis has one continuation: itself
        total = beams.log_probability[..., None] + next_  # [N, K, V]
        lengths = jnp.where(beams.finished, beams.lengths, t + 1)
        candidates = scores(total, lengths[..., None]).reshape(n, -1)
        best, chosen = lax.top_k(candidates, k)
        parent, token = chosen // vocabulary, (chosen % vocabulary).astype(jnp.int32)

        def of_parent(a: Any) -> Any:
            return jnp.take_along_axis(a, parent.reshape(n, k, *(1,) * (a.ndim - 2)), axis=1)

        tokens = lax.dynamic_update_index_in_dim(of_parent(beams.tokens), token, t, 2)
        log_probability = jnp.take_along_axis(total.reshape(n, -1), chosen, axis=1)
        finished = of_parent(beams.finished) | (token == end)
        rows = (jnp.arange(n)[:, None] * k + parent).reshape(-1)
        state = jax.tree.map(lambda a: jnp.take(a, rows, axis=1), state)
        return t + 1, Beams(tokens, of_parent(lengths), log_probability, best, finished), state

    state = jax.tree.map(lambda a: jnp.repeat(a, k, axis=1), state)
    dtype = jax.eval_shape(step, state, jax.ShapeDtypeStruct((n * k,), jnp.int32))[0].dtype
    alone = jnp.where(jnp.arange(k) == 0, 0.0, -jnp.inf).astype(dtype)  # otherwise all K beams would start the same
    start = Beams(
        jnp.full((n, k, steps), end, jnp.int32),
        jnp.zeros((n, k), jnp.int32),
        jnp.broadcast_to(alone, (n, k)),
        jnp.broadcast_to(alone, (n, k)),
        jnp.zeros((n, k), bool),
    )
    return lax.while_loop(go_on, body, (jnp.zeros((), jnp.int32), start, state))[1]
