"""The settings that every function and module of jrnn.nn shares: how a recurrent stack runs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

import jax

from jrnn.errors import LayerError, near
from jrnn.loops import Recompute
from jrnn.nn.checks import check_bools, check_choice, check_floating


@dataclass(frozen=True)
class Settings:
    """The settings of a stack that do not change its parameters.

    Attributes:
        batch_first: batched sequences are [N, T, D] instead of [T, N, D].
        dropout: the probability of dropping an output of a layer; it applies to all layers but the last.
        dropout_mask: "step" for a new mask at every step, or "sequence" for one mask for the whole sequence
            ("variational" dropout: Gal and Ghahramani, 2016).
        recurrent_dropout: the probability of dropping a unit of h before the product with `weight_hh`.
        recurrent_dropout_mask: "sequence" or "step", like `dropout_mask`.
        zoneout: the probability p that a unit keeps its old value at a step (Krueger et al., 2017); for an LSTM
            optionally a pair (h, c). Without randomness the result is the expectation, p old + (1 - p) new.
        dtype: the type of the products with weights; None: the type of the inputs and parameters. With a 16-bit type,
            products accumulate in float32, gates and states are float32, and only outputs are 16-bit.
        recompute: what the backward pass recomputes instead of storing, as in `jrnn.scan`.
        unroll: how many steps one iteration of the loop computes.
        executor: as in `jrnn.scan`.
        merge_directions: whether both directions of a bidirectional layer run in one loop with batched products, which
            needs half as many kernels. None: only on a GPU. Layers with recurrent dropout or zoneout, and layers that
            return all states, always run one direction after the other.

    >>> Settings(dropout=1.5)
    Traceback (most recent call last):
    jrnn.errors.LayerError: dropout is 1.5; a probability lies between 0 and 1
    """

    batch_first: bool = False
    dropout: float = 0.0
    dropout_mask: str = "step"
    recurrent_dropout: float = 0.0
    recurrent_dropout_mask: str = "sequence"
    zoneout: float | tuple[float, float] = 0.0
    dtype: Any = None
    recompute: Recompute = None
    unroll: int = 1
    executor: str = "auto"
    merge_directions: bool | None = None

    def __post_init__(self) -> None:
        check_bools(
            "",
            self,
            "batch_first",
            *(["merge_directions"] if self.merge_directions is not None else []),
        )
        zoneouts = self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,)
        given = {
            "dropout": (self.dropout,),
            "recurrent_dropout": (self.recurrent_dropout,),
            "zoneout": zoneouts,
        }
        for name, rates in given.items():
            if not all(isinstance(rate, Real) and 0.0 <= rate <= 1.0 for rate in rates):
                pair = "; zoneout may be a pair (h, c) of them" if name == "zoneout" else ""
                raise LayerError(
                    f"{name} is {getattr(self, name)!r}; a probability lies between 0 and 1{pair}"
                )
        for name in ("dropout_mask", "recurrent_dropout_mask"):
            check_choice("", name, getattr(self, name), ("step", "sequence"))
        if not isinstance(self.unroll, Integral) or self.unroll < 1:
            raise LayerError(f"unroll is {self.unroll!r}; it must be an integer of at least 1")
        if self.dtype is not None:
            check_floating("dtype", self.dtype)

    @property
    def random(self) -> bool:
        """Whether a training run of these settings draws random numbers."""
        return bool(self.dropout) or self.noisy

    @property
    def noisy(self) -> bool:
        """Whether a step of a training run draws random numbers."""
        return bool(self.recurrent_dropout) or self.zoneout not in (0, (0, 0))

    def merges(self, key: jax.Array | None) -> bool:
        """Whether the directions of a bidirectional layer run in one loop. `key` is None if nothing is random."""
        if key is not None and self.noisy:
            return False
        if self.merge_directions is None:
            return self.executor in ("auto", "scan") and jax.default_backend() == "gpu"
        return self.merge_directions


Function = TypeVar("Function", bound=Callable[..., Any])


def spelled_out(
    *others: Callable[..., Any], without: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """A decorator that lists in a function's signature the keywords that it takes as `**settings`.

    They are the fields of `Settings`, or the keyword-only parameters of `others`, the functions that get them (all of
    `Settings`), except for `without`. `help()` and editors read this signature.

    >>> @spelled_out()
    ... def run(x, **settings): ...
    >>> list(inspect.signature(run).parameters)[:3]
    ['x', 'batch_first', 'dropout']
    """

    def spell_out(function: Function) -> Function:
        signature = inspect.signature(function)
        own = []
        for p in signature.parameters.values():
            if p.kind is not inspect.Parameter.VAR_KEYWORD:
                own.append(p)
        leave_out = {p.name for p in own} | set(without)
        added = {}
        for f in others or (Settings,):
            for p in inspect.signature(f).parameters.values():
                is_keyword = f is Settings or p.kind is inspect.Parameter.KEYWORD_ONLY
                if is_keyword and p.name not in leave_out:
                    added[p.name] = p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        function.__signature__ = signature.replace(parameters=[*own, *added.values()])  # type: ignore[attr-defined]
        return function

    return spell_out


def warn_of_dropout(where: str, dropout: float, num_layers: int) -> None:
    """Warns if there is dropout, which is applied between layers, but only one layer."""
    if dropout and num_layers == 1:
        warnings.warn(
            f"{where}: dropout = {dropout} drops outputs of every layer but the last, and there is one layer: nothing is "
            "dropped; use num_layers=2 or more, recurrent_dropout or zoneout, or apply dropout to the output",
            UserWarning,
            stacklevel=3,
        )


def read(where: str, options: dict[str, Any], others: Iterable[str] = ()) -> Settings:
    """Settings from keyword arguments. The error for an unknown name suggests near names, including `others`.

    >>> read("lstm", {"unrol": 2})
    Traceback (most recent call last):
    jrnn.errors.LayerError: lstm: no setting is called 'unrol'; did you mean 'unroll'?
    """
    known = [field.name for field in fields(Settings)]
    for name in options:
        if name not in known:
            raise LayerError(
                f"{where}: no setting is called {name!r}{near(name, [*others, *known])}"
            )
    return Settings(**options)
