"""A loop whose steps are computed with tiles: which values are read, carried and written, and in which forms.

The forms are found by going through the step backwards: each rule asks for its operands in certain forms. A vector that is
needed both flat and upright is computed twice, which is cheaper on a TPU than converting it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var
from jrnn.loops.kernels.persistent.forms import (
    FLAT,
    UPRIGHT,
    Form,
    MatrixForm,
    decoded,
    encoded,
    long_axes,
    memory_dtype,
    tile_shape,
)
from jrnn.loops.kernels.persistent.rules import TileReader, computed
from jrnn.loops.kernels.refused import Refused
from jrnn.loops.loop import Loop


@dataclass(frozen=True)
class Tiled:
    """A loop whose steps are computed with tiles.

    Attributes:
        loop: the loop, without dead equations.
        reader: the reader that found the forms.
        forms: the forms of each variable that is read.
        consts, carry, xs, ys: the values that are read, carried and written, with their forms; carries by position.
    """

    loop: Loop
    reader: TileReader
    forms: Mapping[Var, Sequence[Form]]
    consts: tuple[tuple[Var, Form], ...]
    carry: tuple[tuple[int, Form], ...]
    xs: tuple[tuple[Var, Form], ...]
    ys: tuple[tuple[Atom, Form], ...]

    def step(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Computes one step, `(carry, ys)`, from tiles in memory to tiles in memory."""
        loop = self.loop
        given = [*self.consts, *((loop.carry[i], form) for i, form in self.carry), *self.xs]
        tiles = {(v, form): decoded(tile, v.aval.dtype) for (v, form), tile in zip(given, (*consts, *carry, *xs))}
        reader = replace(self.reader, read=lambda v, form: tiles[v, form])
        for eqn in loop.eqns:
            for form in _forms_of(eqn, self.forms):
                for v, tile in zip(eqn.outvars, computed(eqn, form, reader)):
                    tiles[v, form] = tile
        new = [encoded(reader.tile(loop.carry_out[i], form)) for i, form in self.carry]
        return new, [encoded(reader.tile(y, form)) for y, form in self.ys]

    def values(self) -> list[tuple[tuple[int, int], Any]]:
        """Returns the shape and dtype of every tile that a step computes."""
        stored = [(v, form) for eqn in self.loop.eqns for v in eqn.outvars for form in self.forms.get(v, ())]
        return [memory_type(v, form) for v, form in stored]


def memory_type(atom: Atom, form: Form) -> tuple[tuple[int, int], Any]:
    """Returns the shape and dtype of a value's tile in memory."""
    dtype = form.dtype if isinstance(form, MatrixForm) else memory_dtype(atom.aval.dtype)
    return tile_shape(atom.aval.shape, form), dtype


def tiled(loop: Loop, on_tpu: bool) -> Tiled:
    """Finds the tiles of a loop. Raises `Refused` if its step cannot be computed with tiles."""
    for eqn in loop.eqns:
        if eqn.effects:
            raise Refused(f"{eqn.primitive.name} has side effects")
    loop = replace(loop, eqns=tuple(jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))[0]))
    forms: dict[Var, dict[Form, None]] = {}

    def ask(v: Var, form: Form) -> Any:
        forms.setdefault(v, {})[form] = None
        return jnp.zeros(tile_shape(v.aval.shape, form), form.dtype if isinstance(form, MatrixForm) else v.aval.dtype)

    reader = TileReader(ask, _natural_forms(loop), frozenset(loop.consts), on_tpu)
    ys = tuple((y, reader.form(y)) for y in loop.ys)

    def go_back() -> list[Any]:
        for y, form in ys:
            reader.tile(y, form)
        known = -1
        while known != (known := sum(map(len, forms.values()))):
            for old, new in zip(loop.carry, loop.carry_out):
                for form in list(forms.get(old) or [reader.form(old)]):
                    reader.tile(new, form)
            for eqn in reversed(loop.eqns):
                for form in _forms_of(eqn, forms):
                    computed(eqn, form, reader)
        return []

    jax.eval_shape(go_back)
    return Tiled(
        loop,
        reader,
        {v: tuple(of) for v, of in forms.items()},
        tuple((v, form) for v in loop.consts for form in forms.get(v, ())),
        tuple((i, form) for i, v in enumerate(loop.carry) for form in forms.get(v) or [reader.form(v)]),
        tuple((v, form) for v in loop.xs for form in forms.get(v, ())),
        ys,
    )


def _forms_of(eqn: Eqn, forms: Mapping[Var, Any]) -> list[Form]:
    return list(dict.fromkeys(form for v in eqn.outvars for form in forms.get(v, ())))


def _natural_forms(loop: Loop) -> dict[Var, Form]:
    """Returns the form of each vector that costs least, if it is known."""
    forms: dict[Var, Form] = {}
    for v in loop.inputs:
        _set_by_shape(v, forms)
    for eqn in loop.eqns:
        first = long_axes(eqn.invars[0].aval.shape) if eqn.invars else ()
        for v in eqn.outvars:
            if len(long_axes(v.aval.shape)) != 1:
                continue
            known = next((forms[a] for a in eqn.invars if jaxprs.is_in(a, forms)), None)
            if len(first) == 2 and eqn.primitive.name.startswith("reduce"):
                forms[v] = FLAT if first[0] in eqn.params["axes"] else UPRIGHT
            elif len(first) == 2 and eqn.primitive.name in ("slice", "split"):
                forms[v] = UPRIGHT if long_axes(v.aval.shape)[0] == first[0] else FLAT
            elif eqn.primitive.name == "dot_general":
                forms[v] = FLAT
            elif known is not None:
                forms[v] = known
            else:
                _set_by_shape(v, forms)
    return forms


def _set_by_shape(v: Var, forms: dict[Var, Form]) -> None:
    axes = long_axes(v.aval.shape)
    if v.aval.ndim > 1 and len(axes) == 1:
        forms[v] = FLAT if axes[0] == v.aval.ndim - 1 else UPRIGHT
