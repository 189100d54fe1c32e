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
on their own, where a Do binds some to outer blobs (CLOSED). `keeps_outputs` says whether an operator may leave an output
unchanged, like a branch that is not taken.
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from jrnn.errors import GradientError, JrnnError, check_known, describe_op
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
from jrnn.nets.graph.rename import new_names, rename_in_workspace
from jrnn.nets.graph.scope import binds, has_sub_nets, keeps_outputs
from jrnn.nets.ir import DeviceOption, Net, Op

SUM_TAG = "is_auto_gen_sum_ops:1"  # compat: marks the accumulating sums for Caffe2's memory planner

# The position of a gradient operator in `_Pass.ops`, and of one of its outputs.
Place = tuple[int, int]


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
        seed: its gradient, if the caller gave it.
        passed: blobs in `terms` that no gradient operator wrote.
    """

    readers: list[int] = field(default_factory=list)
    writer: int | None = None
    terms: list[_Term] = field(default_factory=list)
    seed: Gradient | None = None
    passed: set[str] = field(default_factory=set)


class _Pass:
    """The state of a backward pass. `backward_pass` calls `seed`, and then `differentiate` and `accumulate` backward."""

    def __init__(self, forward: Iterable[Op], net_name: str, external: Iterable[str]) -> None:
        self.forward = list(forward)
        self.net_name = net_name

        # The gradient operators so far, and blob -> positions in `ops` of its readers and writers, some of them outdated.
        self.ops: list[Op] = []
        self.reading: dict[str, list[int]] = defaultdict(list)
        self.writing: dict[str, list[int]] = defaultdict(list)

        # The versions of blobs in the forward pass.
        self.inputs: list[list[Version]] = []  # of each operator
        self.outputs: list[list[Version]] = []
        self.last: dict[str, int] = dict.fromkeys(external, 0)  # blob -> number of its last version
        self.values: dict[Version, _Value] = defaultdict(_Value)
        # Overwritten versions -> their copies, in the order of the first use.
        self.saved: dict[Version, str] = {}

        # Their gradients, in the order in which they arrive, and blob -> the versions whose gradients it holds.
        self.gradients: dict[Version, Gradient] = {}
        self.holders: dict[str, set[Version]] = defaultdict(set)

        for index, op in enumerate(self.forward):
            self._number_versions(index, op)
        # Names that no gradient may have, and name -> a number such that `fresh` need not try smaller ones.
        self.taken = set(self.last)
        self.numbers: dict[str, int] = {}

    def _number_versions(self, index: int, op: Op) -> None:
        """Records the versions that a forward operator reads and writes."""
        inputs = list(op.inputs)
        # Outputs that a branch or loop may leave unchanged count as inputs too, after the operator's own.
        if keeps_outputs(op):
            inputs += [n for n in op.outputs if n in self.last and n not in op.inputs]

        read = []
        for name in inputs:
            version = Version(name, self.last.setdefault(name, 0))
            self.values[version].readers.append(index)
            read.append(version)
        self.inputs.append(read)

        written = []
        for name in op.outputs:
            self.last[name] = self.last.get(name, -1) + 1
            version = Version(name, self.last[name])
            self.values[version].writer = index
            written.append(version)
        self.outputs.append(written)

    def fresh(self, name: str) -> str:
        """`name`, or `name_k` if a forward blob or another gradient has that name."""
        k = self.numbers.get(name, 0)
        free = name if k == 0 else f"{name}_{k - 1}"
        while free in self.taken or self.holders.get(free):
            if free in self.taken and self.numbers.get(name, 0) == k:
                # It stays taken, unlike a name that a gradient holds.
                self.numbers[name] = k + 1
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
        names = list(names_of(self.gradients.get(v)))
        for term in self.values[v].terms:
            names += names_of(term.gradient)
        for name in names:
            self.holders[name].discard(v)

    def seed(self, ys: Mapping[str, Gradient | None]) -> None:
        """Adds the gradients at which the pass begins."""
        for y, g in ys.items():
            check_known(
                y,
                self.last,
                GradientError,
                f"net {self.net_name!r} has no blob {y!r} to differentiate",
            )
            v = Version(y, self.last[y])
            # The caller reads y after the last operator.
            self.values[v].readers.append(len(self.forward))
            if g is None:
                name = self.fresh(y + "_autogen_grad")
                self.emit(Op.of(registry.SEED, [y], [name], value=1.0))
                term = _Term(name, ((len(self.ops) - 1, 0),))
            else:
                self.values[v].seed = g
                term = _Term(g, (None,) * len(names_of(g)))
            self._add(v, term)

    def differentiate(self, index: int) -> None:
        """Emits the gradient operators of one forward operator."""
        op = self.forward[index]
        arriving = [self.gradients.get(v) for v in self.outputs[index]]
        maker = registry.gradient_maker(op.type)
        # A ZeroGradient goes on: it has a maker, but no output.
        is_zero_gradient = maker is not None and not op.outputs
        if not is_zero_gradient and all(g is None for g in arriving):
            return
        answers: dict[int, Gradient] = {}
        emitted: list[Op] = []
        if maker is not None:
            g = GradientMaker(
                op=op,
                inputs=self.inputs[index],
                outputs=self.outputs[index],
                arriving=arriving,
                value=self.value,
                fresh=self.fresh,
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
        names = self._names_of_tokens(index, emitted, answers)
        self._register(
            index=index,
            emitted=[rename_in_workspace(op, names) for op in emitted],
            answers={k: renamed(answer, names) for k, answer in answers.items()},
        )

    def _names_of_tokens(
        self, index: int, emitted: list[Op], answers: dict[int, Gradient]
    ) -> dict[str, str]:
        """The name for each token: its usual name, or a fresh one if a blob of that name is in use."""
        answered = {*chain.from_iterable(map(names_of, answers.values()))}
        first_writer: dict[str, int] = {}
        last_reader: dict[str, int] = {}
        for position, op in enumerate(emitted):
            last_reader.update(dict.fromkeys(op.inputs, position))
            for name in op.outputs:
                first_writer.setdefault(name, position)

        names: dict[str, str] = {}
        for k, answer in answers.items():
            for token in names_of(answer):
                if not isinstance(token, Token):
                    continue
                usual = token.usual
                # It is the gradient of another input, because a maker passed it through, or an operator of this maker
                # still reads it.
                in_use = usual in answered or last_reader.get(usual, -1) > first_writer[token]
                in_use = in_use or any(
                    has_sub_nets(op) and binds(op, usual, token) for op in emitted
                )
                names[token] = self._free_name(usual, self.inputs[index][k], in_use)
        return names

    def _free_name(self, usual: str, v: Version, in_use: bool) -> str:
        """The name of a gradient of `v`; `in_use` says whether the operators of its maker exclude the usual name."""
        if self.values[v].seed == usual:
            return self.fresh(usual + "_accum")  # compat: the name that Caffe2's recurrent nets use
        in_use |= usual in self.taken or not self.holders[usual] <= {v}
        # Or it is a term of the same sum that a maker passed through.
        in_use |= usual in self.values[v].passed
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
            places: list[Place | None] = []
            for name in names_of(answers[k]):
                queue = written[name]
                places.append(queue[0] if queue else None)
                if len(queue) > 1:
                    queue.popleft()
            self._add(self.inputs[index][k], _Term(answers[k], tuple(places)))

    def _add(self, v: Version, term: _Term) -> None:
        """Adds a term to the gradient of a version of a blob."""
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
            is_sparse = [isinstance(term.gradient, GradientSlice) for term in terms]
            if any(is_sparse) and not all(is_sparse):
                raise GradientError(
                    f"gradients of {v.name!r} are partly sparse and partly dense, and cannot be added; give every Gather of "
                    f"{v.name!r} dense_gradient=1"
                )
            self.release(v)
            add = self._concatenate if all(is_sparse) else self._sum
            total = add(v, terms)
            value.terms = []
            value.passed = set()
            self._add(v, _Term(total, (None,) * len(names_of(total))))

    def _base_name(self, v: Version, terms: list[_Term]) -> str:
        """The name of a total, as Caffe2 chooses it: the name of the first term that a gradient operator writes."""
        seed = self.values[v].seed
        if seed == v.name + "_grad":
            return seed
        for term in terms:
            for name, place in zip(names_of(term.gradient), term.places):
                if place is None:
                    continue
                if isinstance(term.gradient, GradientSlice):
                    name = name.removesuffix("_indices").removesuffix("_values")
                return name
        return self.fresh(v.name + "_grad")

    def _split(self, terms: list[_Term], which: int, skip: int) -> list[str]:
        """Renames blob `which` of each term that a gradient operator writes, except for the first `skip`. Returns all."""
        names = []
        count = -skip
        for term in terms:
            name = names_of(term.gradient)[which]
            place = term.places[which]
            if place is not None:
                if count >= 0:
                    name = self._rename(place, count)
                count += 1
            names.append(name)
        return names

    def _rename(self, place: Place, count: int) -> str:
        """Gives an output of a gradient operator a unique name."""
        k, j = place
        op = self.ops[k]
        old = op.outputs[j]
        name = self.fresh(f"_{old}_autosplit_{count}")
        # compat: other versions of the blob get this name too, after this sum has read it
        self.taken.discard(name)
        self.numbers.pop(f"_{old}_autosplit_{count}", None)
        outputs = list(op.outputs)
        outputs[j] = name
        op = replace(op, outputs=tuple(outputs))
        self.ops[k] = rename_in_workspace(op, {old: name}, top=False)
        insort(self.writing[name], k)

        # Operators of the same maker may read what it wrote, until the blob is overwritten.
        for after in _after(self.writing[old], k):
            if old in self.ops[after].outputs:
                last = after
                break
        else:
            last = len(self.ops)
        for after in _after(self.reading[old], k):
            if after > last:
                break
            reader = self.ops[after]
            self.ops[after] = replace(reader, inputs=new_names(reader.inputs, {old: name}))
            insort(self.reading[name], after)
        return name

    def _sum(self, v: Version, terms: list[_Term]) -> str:
        """Adds dense gradients."""
        base = self._base_name(v, terms)
        names = self._split(terms, 0, skip=1)
        if base in names:
            k = names.index(base)
            names[0], names[k] = names[k], names[0]
        total = Op.of(registry.ACCUMULATE, names, [base])
        self.emit(total if self.values[v].seed == base else self._tagged(total, terms))
        return base

    def _concatenate(self, v: Version, terms: list[_Term]) -> GradientSlice:
        """Adds sparse gradients: the indices and the values of all terms, one after the other."""
        base = self._base_name(v, terms)
        total = GradientSlice(f"{base}_indices_concat", f"{base}_values_concat")
        for which, name in enumerate(total):
            parts = self._split(terms, which, skip=0)
            concat = Op.of(registry.CONCATENATE, parts, [name, name + "_split"], axis=0)
            self.emit(self._tagged(concat, terms))
        return total

    def _tagged(self, op: Op, terms: list[_Term]) -> Op:
        """An accumulating operator on the device of the first term, marked as Caffe2 marks it."""
        places = filter(None, chain.from_iterable(term.places for term in terms))
        first = next(places, None)
        device = None if first is None else self.ops[first[0]].device_option
        device = device or DeviceOption()
        extra = [info for info in device.extra_info if info != SUM_TAG]
        return replace(op, device_option=replace(device, extra_info=(*extra, SUM_TAG)))

    def forward_with_saves(self) -> tuple[Op, ...]:
        """The forward operators, with a copy of each overwritten value that the backward pass reads."""
        before: dict[int, list[Op]] = defaultdict(list)
        for v, name in self.saved.items():
            overwriter = self.values[Version(v.name, v.number + 1)].writer
            assert overwriter is not None
            before[overwriter].append(Op.of(registry.SAVE, [v.name], [name]))
        ops: list[Op] = []
        for index, op in enumerate(self.forward):
            ops += (*before[index], op)
        return tuple(ops)


def _after(positions: list[int], position: int) -> list[int]:
    """The positions of a sorted list that are greater than `position`."""
    return positions[bisect_right(positions, position) :]


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
        gradient of an overwritten blob is the gradient of its first value.

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
    for v in sorted(state.gradients, key=lambda v: -v.number):
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
