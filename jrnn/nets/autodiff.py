"""Gradients as nets: from forward operators to backward operators, with Caffe2's names and in Caffe2's order.

The algorithm is Caffe2's. It walks the operators backward and asks each one's gradient maker for gradient operators. If a
blob is read more than once, a `Sum` adds its gradients once all of them exist.

Unlike Caffe2, it distinguishes the values that a blob holds one after the other: each is a `Version`, a name and a number.
If the backward pass needs an overwritten value, a `Copy` saves it. If the usual name of a gradient is still in use, the
gradient gets a fresh name. In these cases Caffe2 raises or computes wrong gradients.

`backward_pass` is the entry; `_Pass` holds its state. A comment that begins with "compat:" marks a choice of Caffe2.

From `gradient_maker.py`: a `Gradient` is a blob's name, or a sparse `GradientSlice` of two names (indices, values);
`names_of` lists the names. A gradient maker fills `emitted` (gradient operators) and `answers` (position of an input ->
gradient) of its `GradientMaker`, and may replace `op`. An answer is a gradient that arrived and is passed through, or it is
made of `Token`s: placeholders for names, which know the usual name.

From `graph/scope.py`: `workspace_of` says whether an operator's sub-nets run on the blobs of the net around it (SHARED), or
on their own, of which a Do binds some to outer blobs (CLOSED). `keeps_outputs` says whether an operator may leave an output
unchanged, like a branch that is not taken.
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from jrnn.errors import GradientError, JrnnError, describe_op, near
from jrnn.nets import registry
from jrnn.nets.gradient_maker import (
    Gradient,
    GradientMaker,
    GradientSlice,
    Token,
    Version,
    names_of,
    renamed,
)
from jrnn.nets.graph.rename import rename_in_workspace
from jrnn.nets.graph.scope import binds, has_sub_nets, keeps_outputs
from jrnn.nets.ir import DeviceOption, Net, Op

SUM_TAG = "is_auto_gen_sum_ops:1"  # compat: marks the accumulating sums for Caffe2's memory planner

Place = tuple[
    int, int
]  # the position of a gradient operator in `_Pass.ops`, and of one of its outputs


@dataclass(frozen=True)
class BackwardPass:
    """The result of `backward_pass`.

    Attributes:
        forward: the forward operators, with copies of the overwritten values that `ops` read.
        ops: the gradient operators.
        gradients: blob -> gradient.
    """

    forward: tuple[Op, ...]
    ops: tuple[Op, ...]
    gradients: Mapping[str, Gradient]


@dataclass(frozen=True)
class _Term:
    """One term of the sum that is a blob's gradient.

    `places` has the output that writes each of `names_of(gradient)`, or None if the caller gave that blob or a gradient
    maker passed it through.
    """

    gradient: Gradient
    places: tuple[Place | None, ...]


@dataclass
class _Value:
    """What the pass knows of one version of a blob.

    Attributes:
        readers: positions of the forward operators that read it; the caller reads it after the last one.
        writer: the position of the forward operator that writes it, or None.
        terms: the terms of its gradient.
        given: its gradient, if the caller gave it.
        passed: blobs in `terms` that no gradient operator wrote.
    """

    readers: list[int] = field(default_factory=list)
    writer: int | None = None
    terms: list[_Term] = field(default_factory=list)
    given: Gradient | None = None
    passed: set[str] = field(default_factory=set)


class _Pass:
    """The state of a backward pass. `backward_pass` calls `seed`, and then `differentiate` and `accumulate` backward."""

    def __init__(self, forward: Iterable[Op], net_name: str, external: Iterable[str]) -> None:
        self.forward = list(forward)
        self.net_name = net_name
        self.ops: list[Op] = []  # the gradient operators so far
        self.reading: dict[str, list[int]] = defaultdict(
            list
        )  # blob -> positions in `ops`, some of them outdated
        self.writing: dict[str, list[int]] = defaultdict(list)

        # The versions of blobs in the forward pass.
        self.inputs: list[list[Version]] = []  # of each operator
        self.outputs: list[list[Version]] = []
        self.last: dict[str, int] = dict.fromkeys(external, 0)  # blob -> number of its last version
        self.values: dict[Version, _Value] = defaultdict(_Value)
        self.saved: dict[
            Version, str
        ] = {}  # overwritten versions -> their copies, in the order of the first use

        # Their gradients, in the order in which they arrive, and the blobs that hold these.
        self.gradients: dict[Version, Gradient] = {}
        self.holders: dict[str, set[Version]] = defaultdict(
            set
        )  # blob -> the versions whose gradients it holds

        for k, op in enumerate(self.forward):
            # Outputs that a branch or loop may leave unchanged count as inputs too, after those that the operator lists.
            kept = (
                [n for n in op.outputs if n in self.last and n not in op.inputs]
                if keeps_outputs(op)
                else []
            )
            self.inputs.append(
                [Version(n, self.last.setdefault(n, 0)) for n in (*op.inputs, *kept)]
            )
            for v in self.inputs[-1]:
                self.values[v].readers.append(k)
            versions = []
            for n in op.outputs:
                self.last[n] = self.last[n] + 1 if n in self.last else 0
                versions.append(Version(n, self.last[n]))
                self.values[versions[-1]].writer = k
            self.outputs.append(versions)
        self.taken = set(self.last)  # names that no gradient may have
        self.numbers: dict[
            str, int
        ] = {}  # name -> a number such that `fresh` need not try smaller ones

    def fresh(self, name: str) -> str:
        """`name`, or `name_k` if a forward blob or another gradient has that name."""
        k = self.numbers.get(name, 0)
        free = name if k == 0 else f"{name}_{k - 1}"
        while free in self.taken or self.holders.get(free):
            if free in self.taken and self.numbers.get(name, 0) == k:
                self.numbers[name] = (
                    k + 1
                )  # it stays taken, other than a name that a gradient holds
            free = f"{name}_{k}"
            k = k + 1
        self.taken.add(free)
        return free

    def emit(self, op: Op) -> None:
        """Appends a gradient operator."""
        for name in op.inputs:
            self.reading[name].append(len(self.ops))
        for name in op.outputs:
            self.writing[name].append(len(self.ops))
        self.ops.append(op)

    def value(self, v: Version) -> str:
        """The blob that holds version `v` after the forward pass: itself, or a copy if it is overwritten."""
        if v.number == self.last[v.name]:
            return v.name
        if v not in self.saved:
            self.saved[v] = self.fresh(f"{v.name}_saved")
        return self.saved[v]

    def release(self, v: Version) -> None:
        """Frees the names of version `v`'s gradient, which nothing reads any more."""
        for g in (self.gradients.get(v), *(term.gradient for term in self.values[v].terms)):
            for name in names_of(g):
                self.holders[name].discard(v)

    def seed(self, ys: Mapping[str, Gradient | None]) -> None:
        for y, g in ys.items():
            if y not in self.last:
                raise GradientError(
                    f"net {self.net_name!r} has no blob {y!r} to differentiate{near(y, self.last)}"
                )
            v = Version(y, self.last[y])
            self.values[v].readers.append(
                len(self.forward)
            )  # the caller reads y after the last operator
            if g is None:
                name = self.fresh(y + "_autogen_grad")
                self.emit(Op.of(registry.SEED, [y], [name], value=1.0))
                term = _Term(name, ((len(self.ops) - 1, 0),))
            else:
                self.values[v].given = g
                term = _Term(g, (None,) * len(names_of(g)))
            self._add(v, term)

    def differentiate(self, index: int) -> None:
        """Emits the gradient operators of one forward operator."""
        op = self.forward[index]
        arriving = [self.gradients.get(v) for v in self.outputs[index]]
        maker = registry.gradient_maker(op.type)
        if all(g is None for g in arriving) and not (maker and not op.outputs):
            return  # a ZeroGradient goes on: it has a maker, but no output
        answers: dict[int, Gradient] = {}
        emitted: list[Op] = []
        if maker is not None:
            g = GradientMaker(
                op, self.inputs[index], self.outputs[index], arriving, self.value, self.fresh
            )
            maker(g)
            g.check_all_used()
            answers = g.answers
            emitted = g.emitted
            self.forward[index] = g.op
        elif registry.lookup(op.type).gradient == "forbidden":
            raise GradientError(
                f"{op.type} has no gradient, and one arrives here; put a StopGradient before it"
            )
        elif registry.lookup(op.type).gradient != "stops":
            raise GradientError(
                f"no gradient of {op.type} is registered, and one arrives here; register one with @gradient, or put a "
                "StopGradient before it"
            )
        for v in self.outputs[index]:
            self.release(v)
        self._register(index, *self._name(index, emitted, answers))

    def _name(
        self, index: int, emitted: list[Op], answers: dict[int, Gradient]
    ) -> tuple[list[Op], dict[int, Gradient]]:
        """Replaces each token by its usual name, or by a fresh one if a blob of that name is in use."""
        names: dict[str, str] = {}
        answered = {name for answer in answers.values() for name in names_of(answer)}
        writer = {name: k for k, op in reversed(list(enumerate(emitted))) for name in op.outputs}
        reader = {name: k for k, op in enumerate(emitted) for name in op.inputs}  # the last one
        nesting = [op for op in emitted if has_sub_nets(op)]
        for k, answer in answers.items():
            v = self.inputs[index][k]
            for token in names_of(answer):
                if isinstance(token, Token):
                    usual = token.usual
                    # It is the gradient of another input, because a maker passed it through, or an operator of this maker
                    # still reads it.
                    in_use = usual in answered or reader.get(usual, -1) > writer[token]
                    in_use = in_use or any(binds(op, usual, token) for op in nesting)
                    names[token] = self._free_name(usual, v, in_use)
        emitted = [rename_in_workspace(op, names) for op in emitted]
        return emitted, {k: renamed(a, names) for k, a in answers.items()}

    def _free_name(self, usual: str, v: Version, in_use: bool) -> str:
        """The name of a gradient of `v`; `in_use` says whether the operators of its maker exclude the usual name."""
        if self.values[v].given == usual:
            return self.fresh(usual + "_accum")  # compat: the name that Caffe2's recurrent nets use
        in_use |= usual in self.taken or not self.holders[usual] <= {v}
        in_use |= (
            usual in self.values[v].passed
        )  # a term of the same sum that a maker passed through
        return self.fresh(usual + "_auto") if in_use else usual

    def _register(self, index: int, emitted: list[Op], answers: dict[int, Gradient]) -> None:
        """Appends the gradient operators of one forward operator, and a term for each input that gets a gradient."""
        written: dict[str, deque[Place]] = defaultdict(deque)
        for op in emitted:
            for j, name in enumerate(op.outputs):
                written[name].append((len(self.ops), j))
            self.emit(op)
        for k in sorted(answers):
            # The gradient of Mul(x, x) writes two terms under one name. Each input takes one, and `_rename` renames it.
            queues = [written[n] for n in names_of(answers[k])]
            places = tuple(q.popleft() if len(q) > 1 else next(iter(q), None) for q in queues)
            self._add(self.inputs[index][k], _Term(answers[k], places))

    def _add(self, v: Version, term: _Term) -> None:
        value = self.values[v]
        value.terms.append(term)
        self.gradients[v] = term.gradient
        for name in names_of(term.gradient):
            self.holders[name].add(v)
        if None in term.places:
            value.passed.update(names_of(term.gradient))

    def accumulate(self, index: int) -> None:
        """Sums the gradients of each blob that operator `index` is the first to read. No more gradients of it can arrive."""
        for v in dict.fromkeys(self.inputs[index]):
            value = self.values[v]
            terms = self.values[v].terms
            if value.readers[0] != index or len(terms) < 2:
                continue
            sparse = [isinstance(t.gradient, GradientSlice) for t in terms]
            if any(sparse) and not all(sparse):
                raise GradientError(
                    f"gradients of {v.name!r} are partly sparse and partly dense, and cannot be added; give every Gather of "
                    f"{v.name!r} dense_gradient=1"
                )
            self.release(v)
            g = self._concatenate(v, terms) if all(sparse) else self._sum(v, terms)
            value.terms = []
            value.passed = set()
            self._add(v, _Term(g, (None,) * len(names_of(g))))

    def _base_name(self, v: Version, terms: list[_Term]) -> str:
        """The name of a total, as Caffe2 chooses it: that of the first term that a gradient operator writes."""
        given = self.values[v].given
        if given == v.name + "_grad":
            return given
        for t in terms:
            for name, place in zip(names_of(t.gradient), t.places):
                if place is not None:
                    return (
                        name.removesuffix("_indices").removesuffix("_values")
                        if len(t.places) == 2
                        else name
                    )
        return self.fresh(v.name + "_grad")

    def _split(self, terms: list[_Term], which: int, kept: int) -> list[str]:
        """Renames blob `which` of each term that a gradient operator writes, except for the first `kept`. Returns all."""
        names = [names_of(t.gradient)[which] for t in terms]
        written = [
            (k, place) for k, t in enumerate(terms) if (place := t.places[which]) is not None
        ]
        for count, (k, place) in enumerate(written[kept:]):
            names[k] = self._rename(place, count)
        return names

    def _rename(self, place: Place, count: int) -> str:
        """Gives an output of a gradient operator a name of its own."""
        k, j = place
        op = self.ops[k]
        old = op.outputs[j]
        name = self.fresh(f"_{old}_autosplit_{count}")
        self.taken.discard(
            name
        )  # compat: other versions of the blob get this name too, after this sum has read it
        self.numbers.pop(f"_{old}_autosplit_{count}", None)
        self.ops[k] = rename_in_workspace(
            replace(op, outputs=(*op.outputs[:j], name, *op.outputs[j + 1 :])),
            {old: name},
            top=False,
        )
        insort(self.writing[name], k)
        # Operators of the same maker may read what it wrote, until the blob is overwritten.
        writes, reads = (
            places[old][bisect_right(places[old], k) :] for places in (self.writing, self.reading)
        )
        last = next((after for after in writes if old in self.ops[after].outputs), len(self.ops))
        for after in takewhile(lambda after: after <= last, reads):
            reader = self.ops[after]
            self.ops[after] = replace(
                reader, inputs=tuple(name if n == old else n for n in reader.inputs)
            )
            insort(self.reading[name], after)
        return name

    def _sum(self, v: Version, terms: list[_Term]) -> str:
        base = self._base_name(v, terms)
        names = self._split(terms, 0, kept=1)
        if base in names:
            k = names.index(base)
            names[0], names[k] = names[k], names[0]
        total = Op.of(registry.ACCUMULATE, names, [base])
        self.emit(total if self.values[v].given == base else self._tagged(total, terms))
        return base

    def _concatenate(self, v: Version, terms: list[_Term]) -> GradientSlice:
        base = self._base_name(v, terms)
        joined = []
        for which, kind in enumerate(("indices", "values")):
            name = f"{base}_{kind}_concat"
            joining = Op.of(
                registry.CONCATENATE,
                self._split(terms, which, kept=0),
                [name, name + "_split"],
                axis=0,
            )
            self.emit(self._tagged(joining, terms))
            joined.append(name)
        return GradientSlice(*joined)

    def _tagged(self, op: Op, terms: list[_Term]) -> Op:
        """An accumulating operator on the device of the first term, marked as Caffe2 marks it."""
        places = (place for t in terms for place in t.places if place)
        device = next((self.ops[k].device_option for k, _ in places), None) or DeviceOption()
        extra = (*(i for i in device.extra_info if i != SUM_TAG), SUM_TAG)
        return replace(op, device_option=replace(device, extra_info=extra))

    def forward_with_saves(self) -> tuple[Op, ...]:
        """The forward operators, with a copy of each overwritten value that the backward pass reads."""
        before: dict[int, list[Op]] = defaultdict(list)
        for v, name in self.saved.items():
            overwriter = self.values[Version(v.name, v.number + 1)].writer
            assert overwriter is not None
            before[overwriter].append(Op.of(registry.SAVE, [v.name], [name]))
        return tuple(o for k, op in enumerate(self.forward) for o in (*before[k], op))


def backward_pass(
    ops: Iterable[Op],
    ys: Mapping[str, Gradient | None],
    net_name: str = "",
    *,
    external: Iterable[str] = (),
) -> BackwardPass:
    """Generates the gradient operators of `ops`.

    Args:
        ops: forward operators, in order.
        ys: blob -> the blob that holds its gradient, or None for a gradient of ones, which a ConstantFill makes.
        net_name: for error messages.
        external: blobs that have a value before the first operator, even if no operator reads that value.

    Returns:
        A BackwardPass. Its `gradients` contain every blob that a gradient reached, including intermediate ones. The
        gradient of an overwritten blob is that of its first value.

    Raises:
        GradientError: if an operator on the path has no gradient.
    """
    state = _Pass(ops, net_name, external)
    state.seed(ys)
    for index in reversed(range(len(state.forward))):
        op = state.forward[index]
        try:
            state.differentiate(index)
            state.accumulate(index)
        except JrnnError as e:
            raise e.at(
                describe_op(index, op.type, op.outputs, net_name), op.outputs
            ) from e.__cause__
    gradients: dict[str, Gradient] = {}
    for v in sorted(
        state.gradients, key=lambda v: -v.number
    ):  # the first version of a blob comes last and stays
        overwrites_external = v.number > 0 and state.values[Version(v.name, 0)].writer is None
        if not overwrites_external:
            gradients[v.name] = state.gradients[v]
    return BackwardPass(state.forward_with_saves(), tuple(state.ops), gradients)


def add_gradients(
    net: Net, ys: Iterable[str] | Mapping[str, Gradient | None]
) -> tuple[Net, dict[str, Gradient]]:
    """Appends to a net the operators that compute gradients of `ys`.

    Args:
        net: the forward net.
        ys: names of blobs, whose gradients are then ones; or a mapping from each blob to the blob of its gradient.

    Returns:
        The net with its backward pass, and the gradient of every blob that a gradient reached: a blob's name, or a
        `GradientSlice` of indices and values, as of Gather's table.

    Raises:
        GradientError: for an unknown blob, or an operator without a gradient on the path.

    >>> net = Net("square", (Op.of("Mul", ["x", "x"], ["y"]), Op.of("Sum", ["y", "x"], ["z"])))
    >>> with_gradients, gradients = add_gradients(net, ["z"])
    >>> gradients["x"], [op.type for op in with_gradients.ops]
    ('x_grad', ['Mul', 'Sum', 'ConstantFill', 'MulGradient', 'Sum'])
    """
    seeds = dict(ys) if isinstance(ys, Mapping) else dict.fromkeys(ys)
    result = backward_pass(net.ops, seeds, net.name, external=net.external_inputs)
    return replace(net, ops=result.forward + result.ops), dict(result.gradients)
