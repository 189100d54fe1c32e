"""Loops that are linear attention, as one operator LinearAttention, and causal convolutions, as CausalConvWithState.

    S' = a S + k v^T                    linear, or gated where there is a decay a
    S' = a S + b k (v - (a S)^T k)^T    delta, or gated delta
    y  = S'^T q

Shapes: T time, B batch, H heads, K features of a key, V features of a value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.jaxprs.axes import aligned
from jrnn.jaxprs.flat import FlatEquation, flatten
from jrnn.jaxprs.jax_internals import Primitive
from jrnn.loops.affine.chunkwise.control_flow import expand_control
from jrnn.loops.affine.chunkwise.labeled import Factors, variables
from jrnn.loops.affine.equations import Forms
from jrnn.loops.affine.matrix import AffineForm, matrix_form
from jrnn.loops.affine.terms import Factor, Row, Term
from jrnn.loops.ir import Loop, ScanParams, Unsupported
from jrnn.onnx.emit import GraphEmitter, Value, is_positive, rule

OPSET = 27  # the first with these operators

linear_attention = Primitive("linear_attention")
linear_attention.multiple_results = True


@linear_attention.def_abstract_eval
def _(
    q,
    k,
    v,
    state,
    *gates,
    **_,
):
    """q, k [B, T, H, K], v [B, T, H, V], S [B, H, K, V], a [B, T, H, K or 1], b [B, T, H, 1] -> y [B, T, H, V] and S."""
    return [v, state]


@rule("linear_attention")
def _(
    e: GraphEmitter,
    node: FlatEquation,
    q,
    k,
    v,
    state,
    *gates,
):
    heads = q.shape[2]
    name = node.params["name"]
    if name == "delta":
        gates = [None, *gates]
    else:
        gates = list(gates)
    if "gated" in name:
        if not is_positive(e, gates[0]):
            raise Unsupported("a decay may be negative")
        tiny = np.asarray(np.finfo(np.float32).tiny, np.float32)  # its logarithm is finite
        decay = e.op("Max", [gates[0], tiny], gates[0].shape, np.float32)
        gates[0] = e.op("Log", [decay], decay.shape, np.float32)
    packed = []
    for x in (q, k, v, *gates):
        packed.append(x if x is None else e.reshape(x, (*x.shape[:2], heads * x.shape[3])))
    types = [(packed[2].shape, np.float32), (state.shape, np.float32)]
    options = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": name, "scale": 1.0}
    y, last = e.ops("LinearAttention", [*packed[:3], state, *packed[3:]], types, **options)
    return e.reshape(y, v.shape), last


@rule("causal_convolution")
def _(
    e: GraphEmitter,
    node: FlatEquation,
    x,
    window,
    weight,
    bias=None,
):
    """x [T, N, C], window [N, K - 1, C], weight [C, K], bias [C] -> y like x, and the next window."""
    x = e.transpose(x, (1, 2, 0))
    window = e.transpose(window, (0, 2, 1))
    weight = e.reshape(weight, (weight.shape[0], 1, weight.shape[1]))
    types = [(x.shape, x.dtype), (window.shape, window.dtype)]
    y, last = e.ops("CausalConvWithState", [x, weight, bias, window], types)
    return e.transpose(y, (2, 0, 1)), e.transpose(last, (0, 2, 1))


def as_attention(
    e: GraphEmitter, node: FlatEquation, values: Sequence[Value]
) -> Sequence[Value] | None:
    """Emits a scan as LinearAttention; returns None, and emits nothing that is used, if it is another loop."""
    try:
        recurrence = Recurrence.of(ScanParams.of(node.params))
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        return e.run(flatten(jax.make_jaxpr(recurrence.run)(*types)), values)
    except (Unsupported, jax.errors.InconclusiveDimensionOperation):
        return None


@dataclass(frozen=True)
class Recurrence:
    """A loop whose only carry is S, as the products of factors that LinearAttention gets.

    Attributes:
        scan: the loop; `loop` has its equations, and `consts` are values of the first of its constants.
        forms: labels of axes; S has those in `batch`, K and V, and maybe axes of size 1.
        heads: B and H, the sizes of the axes of S besides K and V: all but the last, and the last.
        terms: q, k, v, and the decay and b, where there are.
        read: the variable y, and the labels of its axes; None for an axis of size 1.
    """

    scan: ScanParams
    loop: Loop
    consts: Sequence[Any]
    forms: Forms
    batch: tuple[int, ...]
    heads: tuple[Any, Any]
    name: str
    terms: tuple[Term, ...]
    read: tuple[Any, tuple[int, ...]]
    value_label: int

    @staticmethod
    def of(scan: ScanParams) -> Recurrence:
        """Reads a loop; raises Unsupported if it is another recurrence."""
        program = expand_control(scan.jaxpr)
        loop = scan.loop(program)
        if (
            len(loop.carry) != 1
            or loop.carry[0].aval.dtype != np.float32
            or loop.carry[0].aval.ndim < 2
        ):
            raise Unsupported("no single matrix is carried")
        moving = jaxprs.depends(loop.eqns, loop.carry)
        known = {*loop.inputs, *_made(loop.eqns)} - moving
        form = matrix_form(loop, (0,), known, loop.ys, {})
        labels = form.forms.axes
        k = form.forms.contracted
        if len(form.free) != 1 or form.columns or form.matrices:
            raise Unsupported("another matrix")
        name, terms = _update(form)
        q, own, read = _read(loop, known, k, form.free[0])
        terms = (_rooted_term(own, q), *(_rooted_term(form.forms, term) for term in terms))
        # A label that S lacks is of an axis that is summed inside of a factor.
        if not form.forms.labels_in(terms) <= set(labels):
            raise Unsupported("a vector with other axes")
        batch = []
        sizes = [1]
        for label in labels:
            if label in (k, form.free[0]):
                continue
            if label is None:
                sizes.append(1)
            else:
                batch.append(label)
                sizes.append(form.forms.size[label])
        if len(sizes) > 2 and jaxprs.is_known(sizes[-1]):
            heads = (math.prod(sizes[:-1]), sizes[-1])
        else:
            heads = (math.prod(sizes), 1)
        return Recurrence(
            scan,
            loop,
            program.consts,
            form.forms,
            tuple(batch),
            heads,
            name,
            terms,
            read,
            form.free[0],
        )

    def run(self, *args: Any) -> list[Any]:
        """The outputs of the scan."""
        loop = self.loop
        size = {**self.forms.size, "T": self.scan.length}
        consts, (state,), xs = self.scan.partition(args)
        env = dict(zip(loop.consts, [*self.consts, *consts]))
        steps = dict(zip(loop.xs, xs))
        jaxprs.over_time(loop.eqns, variables(self.terms), env, steps)
        k = self.forms.contracted
        v = self.value_label
        factors = Factors(env, steps, self.forms.find, jnp.float32, size[k], None)

        def packed(term: Term, last: int | None) -> Any:
            along = (*self.batch, *(() if last is None else (last,)))
            array = factors.value(term).full(("T", *along), size)
            if loop.reverse:
                array = jnp.flip(array, 0)
            array = array.reshape(self.scan.length, *self.heads, 1 if last is None else size[last])
            return jnp.swapaxes(array, 0, 1)

        lasts = [k, k, v]
        for gate in self.terms[3:]:
            lasts.append(k if k in self.forms.labels_in([gate]) else None)
        arrays = list(map(packed, self.terms, lasts))
        order = [i for i, label in enumerate(self.forms.axes) if label not in (k, v)]
        order += [self.forms.axes.index(k), self.forms.axes.index(v)]
        S = jnp.transpose(state, order)
        y, last = linear_attention.bind(
            *arrays[:3], S.reshape(*self.heads, size[k], size[v]), *arrays[3:], name=self.name
        )
        var, labels = self.read
        along = ("T", *self.batch, v)
        y = jnp.swapaxes(y, 0, 1)
        if loop.reverse:
            y = jnp.flip(y, 0)
        y = y.reshape([size[label] for label in along])
        y = jnp.transpose(y, [0, *(along.index(label) for label in labels if label is not None)])
        steps[var] = y.reshape(self.scan.length, *var.aval.shape)
        last = jnp.transpose(last.reshape(S.shape), np.argsort(order))
        return [last, *jaxprs.stacks(loop.eqns, loop.ys, env, steps, self.scan.length)]


def _made(equations: Iterable[Any]) -> dict[Any, Any]:
    """The equation that makes each variable."""
    makers = {}
    for equation in equations:
        makers.update(dict.fromkeys(equation.outvars, equation))
    return makers


def _rooted(forms: Forms, factor: Factor) -> Factor:
    """The factor as the value that it is a view of."""
    of = factor.operand
    labels = forms.resolved(factor.labels)
    if factor.kind == "sum":
        raise Unsupported("a sum of vectors")
    if isinstance(of, tuple):
        return replace(factor, operand=_all_rooted(forms, of), labels=labels)
    makers = _made(forms.eqns)
    while (
        not jaxprs.is_literal(of)
        and of in makers
        and primitives.is_whole_view(makers[of])
        and not any(factor.index)
    ):
        follow = aligned(makers[of], 0, of)
        of = makers[of].invars[0]
        labels = tuple(labels[follow[d]] if d in follow else None for d in range(of.aval.ndim))
    return replace(factor, operand=of, labels=labels)


def _all_rooted(forms: Forms, factors: Iterable[Factor]) -> tuple[Factor, ...]:
    return tuple(_rooted(forms, factor) for factor in factors)


def _rooted_term(forms: Forms, term: Term) -> Term:
    """The term whose factors are the values that they are views of."""
    return replace(term, factors=_all_rooted(forms, term.factors))


def _key(forms: Forms, factor: Factor) -> Any:
    """What two equal factors have in common."""
    factor = _rooted(forms, factor)
    operand = factor.operand
    if isinstance(operand, tuple):
        return frozenset(Counter(_key(forms, f) for f in operand).items()), factor.kind
    return (
        float(operand.val) if jaxprs.is_literal(operand) else operand,
        factor.kind,
        factor.index,
        factor.labels,
    )


def _without(
    forms: Forms, factors: Iterable[Factor], others: Iterable[Factor]
) -> tuple[Factor, ...]:
    """The factors of a product that is divided by others, which must be among them."""
    left = list(factors)
    for other in others:
        equal = next((f for f in left if _key(forms, f) == _key(forms, other)), None)
        if equal is None:
            raise Unsupported("another update")
        left.remove(equal)
    return tuple(left)


def _alone(terms: Sequence[Term]) -> Term:
    if len(terms) != 1:
        raise Unsupported("another sum of terms")
    return terms[0]


def _reads(term: Term) -> tuple[list[Term], list[tuple[Term, Term]]]:
    """The known terms of a term, and its reads of S: the factors of the product that is summed over K, and this product."""
    if not isinstance(term.operand, Row):
        return [term], []
    known = []
    reads = []
    for inner in term.operand.terms:
        if inner.operand is None or isinstance(inner.operand, Row):
            more_known, more_reads = _reads(inner.times(term.factors, term.sign))
            known = known + more_known
            reads = reads + more_reads
        else:
            reads.append((term, inner))
    return known, reads


def _update(form: AffineForm) -> tuple[str, tuple[Term, ...]]:
    """The name of an update, and its k, v, decay and b."""
    forms = form.forms
    k = form.forms.contracted
    (free,) = form.free
    known_terms = []
    reads = []
    for term in (*form.known, *form.updates):
        more_known, more_reads = _reads(term)
        known_terms += more_known
        reads += more_reads
    known = _alone(known_terms)
    decay = _alone(form.decay)
    if decay.sign < 0 or free in forms.labels_in([decay]):
        raise Unsupported("another decay")
    gated = "gated_" * bool(decay.factors)
    gates = [replace(decay, operand=None)] * bool(decay.factors)
    if reads:
        ((outer, inner),) = reads if len(reads) == 1 else [(None, None)]
        if outer is None or outer.sign * inner.sign > 0:
            raise Unsupported("another update")
        key = _without(forms, inner.factors, decay.factors)
        beta = Term(None, _without(forms, outer.factors, key))
        value = _without(forms, known.factors, outer.factors)
        name = f"{gated}delta"
        gates = [*gates, beta]
        if forms.labels_in([beta]) & {k, free}:
            raise Unsupported("another update")
    else:
        key = tuple(f for f in known.factors if k in forms.labels_of(f))
        value = _without(forms, known.factors, key)
        name = gated.rstrip("_") or "linear"
    key = Term(None, key)
    value = Term(None, value, known.sign)
    if free in forms.labels_in([key]) or k in forms.labels_in([value]):
        raise Unsupported("another outer product")
    return name, (key, value, *gates)


def _read(
    loop: Loop, known: set[Any], k: int, free: int
) -> tuple[Term, Forms, tuple[Any, tuple[int, ...]]]:
    """The vector that the new S is multiplied with, the forms of its labels, the product, and the labels of its axes."""
    new = loop.carry_out[0]
    made, _ = jaxprs.needed(loop.eqns, [new], {*known, *loop.carry})
    made_ids = set(map(id, made))
    rest = [equation for equation in loop.eqns if id(equation) not in made_ids]
    forms = Forms((new,), rest, known, {})
    forms.walk()
    late, used = jaxprs.needed(rest, loop.ys, {*known, *forms.readouts})
    given = {*known, *forms.readouts, *_made(late)}
    readouts = [v for v in used if v in forms.readouts]
    if len(readouts) != 1 or forms.contracted != k:
        raise Unsupported("another read")
    for equation in late:
        if not given.issuperset(jaxprs.inputs(equation)):
            raise Unsupported("another read")
    if not set(jaxprs.variables(loop.ys)) <= given:
        raise Unsupported("S is an output of every step")
    (cut,) = readouts
    value = forms.values[cut]
    term = _alone(value.terms)
    if not isinstance(term.operand, Row):
        raise Unsupported("another read")
    inner = _alone(term.operand.terms)
    q = Term(None, (*inner.factors, *term.factors), inner.sign * term.sign)
    labels = forms.resolved(value.labels)
    if (
        inner.operand is not new
        or free in forms.labels_in([q])
        or {*labels, None} != {*forms.axes, None} - {k}
    ):
        raise Unsupported("another read")
    return q, forms, (cut, labels)
