"""Models and states in files: config.json and safetensors or torch's files, one or several, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import FormatError, check_known, near
from jrnn.files import new_folder, read_json, write_whole
from jrnn.files.quantized_tensors import Dequantized, layouts
from jrnn.files.tensors import open_tensors, read_aligned, write_tensors
from jrnn.files.torch_files import open_torch_tensors
from jrnn.models.family import Decoder, Family, Merge, Names, State
from jrnn.nn.checks import Shape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILES = ("config.json", WEIGHTS, "model-*.safetensors", INDEX)  # what `write` replaces
_TYPES = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}

TORCH = "pytorch_model.bin"
UNUSED = (".rotary_emb.inv_freq",)  # ends of the names of constants that older files hold
WRAPPERS = ("module.", "_orig_mod.")  # of models in parallel, and of compiled ones
ROWS = 4096  # of two tensors that are compared at once

NESTED = (  # what a language model's tensors begin with in a model of texts and images, and alone
    ("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)  # fmt: skip


class TensorPlace(NamedTuple):
    """Where a tensor is: a file, the name in it, its shape, safetensors' name of its type, and how it is quantized."""

    file: Path
    stored: str
    shape: Shape
    dtype: str
    layout: str = ""

    def view(self, opened: Any) -> Any:
        """Its slice, of numbers."""
        plain = not self.layout
        if plain:
            return opened.get_slice(self.stored)
        return Dequantized(self.file, opened, self.stored, self.layout)


class Tensors:
    """The tensors of a folder by name, without their values."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        index = next(
            (
                folder / name
                for name in (INDEX, WEIGHTS, f"{TORCH}.index.json", TORCH)
                if (folder / name).exists()
            ),
            None,
        )
        if index is not None and index.suffix == ".json":
            places = read_json(index, FormatError).get("weight_map")
            if not isinstance(places, dict) or not all(
                isinstance(v, str) and Path(v).name == v for v in places.values()
            ):
                raise FormatError(
                    f"{index}: weight_map must map names of tensors to names of files in this folder"
                )
            files = sorted(set(places.values()))
        else:
            files = [WEIGHTS if index is None else index.name]
        self.places: dict[str, TensorPlace] = {}
        for file in files:
            with _opened(folder / file) as opened:
                for stored, layout in layouts(opened.keys()).items():
                    if stored.startswith(family.unused) or stored.endswith(
                        (*family.unused, *UNUSED)
                    ):
                        continue
                    name = _renamed(stored, family)
                    if name in self.places:
                        first = self.places[name].file.name
                        raise FormatError(
                            f"{folder}: the tensor {name!r} is twice, in {first} and {file}"
                        )
                    view = (place := TensorPlace(folder / file, stored, (), "", layout)).view(
                        opened
                    )
                    self.places[name] = place._replace(
                        shape=tuple(view.get_shape()), dtype=view.get_dtype()
                    )
        inside = {name for name, place in self.places.items() if "language_model." in place.stored}
        if inside:  # the others are of images
            self.places = {
                name: p
                for name, p in self.places.items()
                if name in inside or name.startswith("lm_head.")
            }

    def tie(self, names: Names) -> bool:
        """Whether the embedding of a tied model is its output layer, as config.json says.

        As in transformers, a folder with the output layer alone has the embedding, too, and a folder with both, of other
        values, has a model that is not tied.
        """
        if names.head not in self.places:
            return True
        if names.embedding not in self.places:
            self.places[names.embedding] = self.places.pop(names.head)
            return True
        head = self.places[names.head]
        embedding = self.places[names.embedding]
        if head.shape != embedding.shape or not head.shape or head.dtype not in _TYPES:
            return False
        with ExitStack() as files:
            opened = {}
            for f in {head.file, embedding.file}:
                opened[f] = files.enter_context(_opened(f))
            one = head.view(opened[head.file])
            other = embedding.view(opened[embedding.file])
            rows = head.shape[0]
            blocks = []
            for k in range(0, rows, ROWS):
                blocks.append(slice(k, min(k + ROWS, rows)))
            for block in blocks:
                if not np.array_equal(one[block], other[block]):
                    return False
            return True

    def check(self, decoder: Decoder) -> None:
        """Raises unless the tensors are a model's. Joined tensors may be cut at other places."""
        shapes = decoder.shapes()
        spare = decoder.names.head if decoder.tied else None
        joins = []
        for merge in decoder.parameters().values():
            if merge and not merge.stacks:
                joins.append(merge.names)
        joined = {name: names for names in joins for name in names}
        for name, shape in shapes.items():
            check_known(
                name,
                self.places,
                FormatError,
                f"{self.folder}: lacks the tensor {name!r} {list(shape)}",
            )
            stored = self.places[name].shape
            wanted = shape
            if name in joined and all(
                part in self.places and self.places[part].shape[1:] == shape[1:]
                for part in joined[name]
            ):
                stored = (sum(self.places[part].shape[0] for part in joined[name]), *shape[1:])
                wanted = (sum(shapes[part][0] for part in joined[name]), *shape[1:])
            if stored != wanted:
                raise FormatError(
                    f"{self.folder}: {name} is {list(stored)} but config.json makes it {list(wanted)}"
                )
            if (dtype := self.places[name].dtype) not in _TYPES:
                raise FormatError(
                    f"{self.folder}: {name} is {dtype}; it must be one of {', '.join(_TYPES)}"
                )
        for name in self.places:
            if name not in shapes and name != spare:
                raise FormatError(
                    f"{self.folder}: the tensor {name!r} has no place in this model{near(name, shapes)}"
                )


def _opened(path: Path) -> Any:
    """The open tensors of a file of safetensors or of torch."""
    return (open_torch_tensors if path.suffix == ".bin" else open_tensors)(path, FormatError)


def _renamed(name: str, family: Family) -> str:
    """The name in newer files; an old name that begins with a dot may stand anywhere."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    for old, new in (*NESTED, *family.renamed):
        if old.startswith("."):
            name = name.replace(old, new)
        elif name.startswith(old):
            return new + name.removeprefix(old)
    return name


def parameter(
    tensors: Tensors, name: str, merge: Merge | None, mesh: jax.sharding.Mesh | None
) -> jax.Array:
    """Reads a parameter, which may be made of several tensors.

    Files are open, and mapped, no longer than this takes, and the value is complete when the next one is read: memory holds
    one tensor besides the parameters.
    """
    places = []
    for part in merge.names if merge else (name,):
        places.append(tensors.places[part])
    with ExitStack() as files:
        opened: dict[Any, Any] = {}
        views = []
        for place in places:
            if place.file not in opened:
                opened[place.file] = files.enter_context(_opened(place.file))
            views.append(place.view(opened[place.file]))
        if merge is not None and not merge.stacks:
            whole = np.concatenate([view[:] for view in views])
            return jax.device_put(
                whole, None if mesh is None else _sharding(mesh, whole.shape)
            ).block_until_ready()
        shape = (len(places), *places[0].shape) if merge else places[0].shape

        def read(index: tuple[slice, ...]) -> np.ndarray:
            if merge is None:
                return views[0][index] if shape else views[0][:]
            return np.stack([view[index[1:]] for view in views[index[0]]])

        if mesh is None:
            return jax.device_put(read_aligned(read, shape), may_alias=True).block_until_ready()
        return jax.make_array_from_callback(shape, _sharding(mesh, shape), read).block_until_ready()


def _sharding(mesh: jax.sharding.Mesh, shape: Shape) -> jax.sharding.NamedSharding:
    axes = [k for k, size in enumerate(shape) if size % mesh.size == 0]
    spec: list[Any] = [None] * len(shape)
    if axes:
        spec[max(axes, key=lambda k: shape[k])] = mesh.axis_names
    # Without axis types: XLA decides how results are shared.
    return jax.sharding.NamedSharding(
        jax.sharding.Mesh(mesh.devices, mesh.axis_names), jax.sharding.PartitionSpec(*spec)
    )


def write(
    folder: str | PathLike[str],
    text: str,
    params: Mapping[str, jax.Array],
    decoder: Decoder,
    shard_bytes: int,
) -> None:
    """Writes config.json and safetensors files of at most `shard_bytes`, or of one tensor, in one step.

    Other files of the folder stay, such as the tokenizer's; see `jrnn.files.new_folder`.
    """
    shapes = decoder.shapes()
    # tensors, each with its parameter and its place in it
    shards: list[list[tuple[str, str, Any]]] = [[]]
    filled = total = 0
    for name, merge in decoder.parameters().items():
        row = 0
        for k, part in enumerate(merge.names if merge else (name,)):
            size = int(np.prod(shapes[part])) * params[name].dtype.itemsize
            if shards[-1] and filled + size > shard_bytes:
                shards.append([])
                filled = 0
            index: Any = ...
            if merge is not None:
                index = k if merge.stacks else slice(row, row + shapes[part][0])
            row += shapes[part][0] if shapes[part] else 0
            shards[-1].append((part, name, index))
            filled = filled + size
            total = total + size
    places = {}
    with new_folder(folder, FormatError, replaces=FILES) as new:
        write_whole(new / "config.json", text.encode(), FormatError)
        for number, shard in enumerate(shards, 1):
            if len(shards) == 1:
                file = WEIGHTS
            else:
                file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            arrays = {part: params[name][index] for part, name, index in shard}
            write_tensors(new / file, arrays, FormatError, {"format": "pt"})
            places |= dict.fromkeys(arrays, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_whole(new / INDEX, (json.dumps(index, indent=2) + "\n").encode(), FormatError)


def save_state(path: str | PathLike[str], state: State) -> None:
    """Writes the state of a model to a safetensors file, so that a conversation can go on later.

    >>> import tempfile
    >>> path = tempfile.mktemp(".safetensors")
    >>> save_state(path, {"0.ssm": jnp.ones((1, 2))})
    >>> load_state(path)["0.ssm"].shape
    (1, 2)
    """
    write_tensors(path, state, FormatError)


def load_state(path: str | PathLike[str]) -> State:
    """Reads a state that `save_state` wrote.

    Raises:
        FormatError: if the file is missing or damaged.
    """
    with open_tensors(path, FormatError) as opened:
        return {name: jnp.asarray(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - no mapping
