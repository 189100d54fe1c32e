"""Gradients as nets: from forward operators and seeds to backward operators, named and ordered as Caffe2 does.

The algorithm is Caffe2's: walk the operators backwards, ask each one's gradient maker for gradient operators, and where a
blob was read more than once, add the gradients up with a `Sum` once all of them are there. Blobs are told apart by
(name, version), so that overwritten blobs, given gradients of intermediate blobs and gradients that share a blob are right
too: an overwritten value that the backward pass needs is saved by a `Copy`, and a gradient whose usual name is still in use
gets a fresh one. In those cases Caffe2 raises, or is silently wrong.

From `gradient_maker.py`: a `Version` is a blob's name and number of overwrites; a `Token` stands for a gradient's name
until a free one is known; `names_of` and `renamed` treat dense gradients (one blob) and sparse ones (`GradientSlice`)
alike. From `graph/scope.py`: `workspace_of` says whether an operator's sub-nets share the blobs around it,
`keeps_outputs` whether an operator may leave an output as it was (a branch not taken). `backward_pass` is the entry;
`_Pass` holds its state.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jrnn import registry
from jrnn.errors import GradientError, JrnnError, describe_op, near
from jrnn.gradient_maker import Gradient, GradientMaker, GradientSlice, Token, Version, names_of, renamed
from jrnn.graph.scope import Workspace, keeps_outputs, workspace_of
from jrnn.ir import DeviceOption, Net, Op

SUM_TAG = "is_auto_gen_sum_ops:1"  # compat: marks the accumulating sums for Caffe2's memory planner


@dataclass
class _Generator:
    """Where one part of a gradient comes from: outputs of gradient operators, or (None) a gradient passed through."""

    gradient: Gradient
    places: tuple[tuple[int, int] | None, ...]  # (operator, output) that writes the name, or the indices and the values


@dataclass(frozen=True)
class BackwardPass:
    """`forward` operators (with copies of overwritten blobs that are needed), gradient `ops`, and blob -> gradient."""

    forward: tuple[Op, ...]
    ops: tuple[Op, ...]
    gradients: Mapping[str, Gradient]


@dataclass
class _Pass:
    forward: list[Op]
    net_name: str
    external: tuple[str, ...] = ()
    inputs: list[list[Version]] = field(default_factory=list)
    outputs: list[list[Version]] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    readers: dict[Version, list[int]] = field(default_factory=lambda: defaultdict(list))
    writer: dict[Version, int] = field(default_factory=dict)
    generators: dict[Version, list[_Generator]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[Version, Gradient] = field(default_factory=dict)
    holders: dict[str, list[Version]] = field(default_factory=lambda: defaultdict(list))
    given: dict[Version, Gradient] = field(default_factory=dict)
    saved: dict[Version, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    ops: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last.update(dict.fromkeys(self.external, 0))
        for k, op in enumerate(self.forward):
            # an output that a branch or loop may leave as it was is read too, after the inputs that the operator lists
            kept = [n for n in op.outputs if n in self.last and n not in op.inputs] if keeps_outputs(op) else []
            self.inputs.append([Version(n, self.last.setdefault(n, 0)) for n in (*op.inputs, *kept)])
            for v in self.inputs[-1]:
                self.readers[v].append(k)
            versions = []
            for n in op.outputs:
                self.last[n] = self.last[n] + 1 if n in self.last else 0
                versions.append(Version(n, self.last[n]))
                self.writer[versions[-1]] = k
            self.outputs.append(versions)
        self.taken.update(self.last)

    def fresh(self, name: str) -> str:
        """`name`, or `name_k` where a forward blob or another gradient has that name."""
        k, found = 0, name
        while found in self.taken or self.holders.get(found):
            found, k = f"{name}_{k}", k + 1
        self.taken.add(found)
        return found

    def value(self, v: Version) -> str:
        """The blob in which version `v` can be read after the forward pass."""
        if v.number == self.last[v.name]:
            return v.name
        if v not in self.saved:
            self.saved[v] = self.fresh(f"{v.name}_saved")
        return self.saved[v]

    def hold(self, gradient: Gradient, v: Version) -> None:
        for name in names_of(gradient):
            self.holders[name].append(v)

    def release(self, v: Version) -> None:
        """Version `v`'s gradient has been used by the operator that wrote `v`, so its name is free."""
        for g in (self.gradients.get(v), *(g.gradient for g in self.generators.get(v, ()))):
            for name in names_of(g):
                self.holders[name] = [h for h in self.holders[name] if h != v]

    def seed(self, ys: Mapping[str, Gradient | None]) -> None:
        for y, g in ys.items():
            if y not in self.last:
                raise GradientError(f"net {self.net_name!r} has no blob {y!r} to differentiate{near(y, self.last)}")
            v = Version(y, self.last[y])
            self.readers[v].append(len(self.forward))
            if g is None:
                name = self.fresh(y + "_autogen_grad")
                self.ops.append(Op.of(registry.SEED, [y], [name], value=1.0))
                places: tuple[tuple[int, int] | None, ...] = ((len(self.ops) - 1, 0),)
                g = name
            else:
                self.given[v] = g
                places = (None,) * len(names_of(g))
            self.generators[v].append(_Generator(g, places))
            self.gradients[v] = g
            self.hold(g, v)

    def differentiate(self, index: int) -> None:
        """Emits the gradient operators of one forward operator."""
        op = self.forward[index]
        arriving = [self.gradients.get(v) for v in self.outputs[index]]
        maker = registry.gradient_maker(op.type)
        if all(g is None for g in arriving) and not (maker and not op.outputs):
            return
        if maker is None:
            if registry.lookup(op.type).gradient != "stops":
                raise GradientError(self._refusal(op))
            answers: dict[int, Gradient] = {}
            emitted: list[Op] = []
        else:
            g = GradientMaker(op, self.inputs[index], self.outputs[index], arriving, self.value, self.fresh)
            maker(g)
            g.check_all_used()
            answers, emitted = g.answers, g.emitted
            self.forward[index] = g.op
        for v in self.outputs[index]:
            self.release(v)
        self._register(index, *self._name(index, emitted, answers))

    def _refusal(self, op: Op) -> str:
        if registry.lookup(op.type).gradient == "forbidden":
            return f"{op.type} has no gradient, and one arrives here; put a StopGradient before it"
        return f"no gradient of {op.type} is registered, and one arrives here; register one with @gradient, or stop it"

    def _name(
        self, index: int, emitted: list[Op], answers: dict[int, Gradient]
    ) -> tuple[list[Op], dict[int, Gradient]]:
        """Replaces tokens by names: the usual one, or a fresh one where that still holds another gradient."""
        names: dict[str, str] = {}
        for k, answer in answers.items():
            v = self.inputs[index][k]
            for token in names_of(answer):
                if isinstance(token, Token):
                    names[token] = self._free_name(token, v, emitted, answers)
        emitted = [_with_names(op, names) for op in emitted]
        return emitted, {k: renamed(a, names) for k, a in answers.items()}

    def _free_name(self, token: str, v: Version, emitted: list[Op], answers: dict[int, Gradient]) -> str:
        usual = token.split("\0")[0]
        if self.given.get(v) == usual:
            return self.fresh(usual + "_accum")  # compat: the name that Caffe2's recurrent nets use
        passed = any(usual in names_of(g.gradient) and None in g.places for g in self.generators.get(v, ()))
        passed = passed or any(usual in names_of(a) for a in answers.values())
        writes = next(k for k, op in enumerate(emitted) if token in op.outputs)
        read_later = any(usual in op.inputs for op in emitted[writes + 1 :])
        held = any(h != v for h in self.holders.get(usual, ()))
        if usual in self.taken or passed or read_later or held or any(_binds(op, usual, token) for op in emitted):
            return self.fresh(usual + "_auto")
        return usual

    def _register(self, index: int, emitted: list[Op], answers: dict[int, Gradient]) -> None:
        start = len(self.ops)
        self.ops += emitted
        written: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for k, op in enumerate(emitted):
            for j, name in enumerate(op.outputs):
                written[name].append((start + k, j))
        for k in sorted(answers):
            g, v = answers[k], self.inputs[index][k]
            # Mul(x, x) writes both parts under one name: the k-th input takes the k-th of them, and a Sum tells them apart
            places = tuple(_next_place(written[n]) for n in names_of(g))
            self.generators[v].append(_Generator(g, places))
            self.gradients[v] = g
            self.hold(g, v)

    def accumulate(self, index: int) -> None:
        """Adds up the gradients of the blobs that operator `index` is the first to read."""
        for v in dict.fromkeys(self.inputs[index]):
            parts = self.generators.get(v, [])
            if self.readers[v][0] != index or len(parts) < 2:
                continue
            sparse = [isinstance(g.gradient, GradientSlice) for g in parts]
            if any(sparse) and not all(sparse):
                raise GradientError(
                    f"gradients of {v.name!r} are partly sparse and partly dense, which cannot be added up; give every "
                    f"Gather of {v.name!r} dense_gradient=1"
                )
            self.release(v)
            g = self._concatenate(v, parts) if all(sparse) else self._sum(v, parts)
            self.gradients[v] = g
            self.generators[v] = [_Generator(g, (None,) * len(names_of(g)))]
            self.hold(g, v)

    def _base_name(self, v: Version, parts: list[_Generator]) -> str:
        given = self.given.get(v)
        if given == v.name + "_grad":
            return given
        for g in parts:
            for name, place in zip(names_of(g.gradient), g.places):
                if place is not None:
                    return name.removesuffix("_indices").removesuffix("_values") if len(g.places) == 2 else name
        return self.fresh(v.name + "_grad")

    def _split(self, place: tuple[int, int], count: int) -> str:
        """Renames an output of a gradient operator, so that it is one term of a sum."""
        k, j = place
        op = self.ops[k]
        old = op.outputs[j]
        name = self.fresh(f"_{old}_autosplit_{count}")
        self.taken.discard(name)  # compat: the same name serves every version of the blob; the sum reads it at once
        self.ops[k] = _with_names(
            replace(op, outputs=(*op.outputs[:j], name, *op.outputs[j + 1 :])), {old: name}, top=False
        )
        for after in range(k + 1, len(self.ops)):  # operators of the same maker may read what it wrote
            reader = self.ops[after]
            self.ops[after] = replace(reader, inputs=tuple(name if n == old else n for n in reader.inputs))
            if old in reader.outputs:
                break
        return name

    def _sum(self, v: Version, parts: list[_Generator]) -> str:
        base = self._base_name(v, parts)
        terms, count, first = [], 0, True
        for g in parts:
            (place,) = g.places
            name = str(g.gradient)
            if place is not None:
                if not first:
                    name, count = self._split(place, count), count + 1
                first = False
            terms.append(name)
        if base in terms:
            k = terms.index(base)
            terms[0], terms[k] = terms[k], terms[0]
        total = Op.of(registry.ACCUMULATE, terms, [base])
        self.ops.append(total if self.given.get(v) == base else self._tagged(total, parts))
        return base

    def _tagged(self, op: Op, parts: list[_Generator]) -> Op:
        """An accumulating operator on the device of the first part, marked as Caffe2 marks it."""
        makers = (place for g in parts for place in g.places if place)
        device = next((self.ops[k].device_option for k, _ in makers), None) or DeviceOption()
        extra = (*(i for i in device.extra_info if i != SUM_TAG), SUM_TAG)
        return replace(op, device_option=replace(device, extra_info=extra))

    def _concatenate(self, v: Version, parts: list[_Generator]) -> GradientSlice:
        base = self._base_name(v, parts)
        joined = []
        for which, kind in enumerate(("indices", "values")):
            terms, count = [], 0
            for g in parts:
                name = names_of(g.gradient)[which]
                place = g.places[which]
                if place is not None:
                    name, count = self._split(place, count), count + 1
                terms.append(name)
            name = f"{base}_{kind}_concat"
            joining = Op.of(registry.CONCATENATE, terms, [name, name + "_split"], axis=0)
            self.ops.append(self._tagged(joining, parts))
            joined.append(name)
        return GradientSlice(*joined)

    def forward_with_saves(self) -> tuple[Op, ...]:
        """The forward operators, with a copy of each overwritten value that the backward pass reads."""
        before: dict[int, list[Op]] = defaultdict(list)
        for v, name in self.saved.items():
            overwriter = self.writer[Version(v.name, v.number + 1)]
            before[overwriter].append(Op.of(registry.SAVE, [v.name], [name]))
        return tuple(o for k, op in enumerate(self.forward) for o in (*before[k], op))


def _binds(op: Op, read: str, written: str) -> bool:
    """Whether a net bound by name (that of a Do) reads one of the blobs and writes the other: their names must differ."""
    kind = workspace_of(op)
    if kind is Workspace.SHARED:
        return any(_binds(o, read, written) for _, net in op.sub_nets() for o in net.ops)
    return kind is Workspace.CLOSED and read in op.inputs and written in op.outputs


def _with_names(op: Op, names: Mapping[str, str], *, top: bool = True) -> Op:
    """The operator with blobs renamed, its own (`top`) and those of sub-nets that run in the same workspace."""
    if top:
        op = replace(
            op, inputs=tuple(names.get(n, n) for n in op.inputs), outputs=tuple(names.get(n, n) for n in op.outputs)
        )
    if workspace_of(op) is not Workspace.SHARED:
        return op
    return op.map_sub_nets(lambda net: replace(net, ops=tuple(_with_names(o, names) for o in net.ops)))


def backward_pass(
    ops: Iterable[Op], ys: Mapping[str, Gradient | None], net_name: str = "", *, external: Iterable[str] = ()
) -> BackwardPass:
    """The gradient operators of `ops` for the gradients `ys` of their blobs.

    Args:
        ops: forward operators, in order.
        ys: blob -> the blob that holds its gradient, or None for a gradient of ones made by a ConstantFill.
        net_name: for error messages.
        external: blobs that have a value before the first operator, although none may read it.

    Returns:
        A BackwardPass. Its `gradients` hold every blob that a gradient reached, also intermediate ones; of a blob that was
        overwritten, the gradient is that of its first value.

    Raises:
        GradientError: where an operator on the path has no gradient.
    """
    p = _Pass(list(ops), net_name, tuple(external))
    p.seed(ys)
    for index in reversed(range(len(p.forward))):
        op = p.forward[index]
        try:
            p.differentiate(index)
            p.accumulate(index)
        except JrnnError as e:
            raise e.at(describe_op(index, op.type, op.outputs, net_name)) from e.__cause__
    found: dict[str, Gradient] = {}
    for v in sorted(p.gradients, key=lambda v: -v.number):
        if v.number == 0 or Version(v.name, 0) in p.writer:  # else it is not the gradient of the value that was given
            found[v.name] = p.gradients[v]
    return BackwardPass(p.forward_with_saves(), tuple(p.ops), found)


def add_gradients(net: Net, ys: Iterable[str] | Mapping[str, Gradient | None]) -> tuple[Net, dict[str, Gradient]]:
    """Appends to a net the operators that compute gradients of `ys`.

    Args:
        net: the forward net.
        ys: names of blobs, each given a gradient of ones; or a mapping from blob to the name of its gradient.

    Returns:
        The net with its backward pass, and the gradient of every blob that one reached: a blob's name, or a
        `GradientSlice` of indices and values (Gather's table).

    Raises:
        GradientError: for an unknown blob, or an operator without gradient on the path.

    >>> net = Net("square", (Op.of("Mul", ["x", "x"], ["y"]), Op.of("Sum", ["y", "x"], ["z"])))
    >>> with_gradients, gradients = add_gradients(net, ["z"])
    >>> gradients["x"], [op.type for op in with_gradients.ops]
    ('x_grad', ['Mul', 'Sum', 'ConstantFill', 'MulGradient', 'Sum'])
    """
    seeds = dict(ys) if isinstance(ys, Mapping) else dict.fromkeys(ys)
    result = backward_pass(net.ops, seeds, net.name, external=net.external_inputs)
    return replace(net, ops=result.forward + result.ops), dict(result.gradients)


def _next_place(places: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Of several places the first, which is taken off; the only one; or None."""
    if len(places) > 1:
        return places.pop(0)
    return places[0] if places else None
