"""from_onnx: converts an ONNX file to a pure JAX function with its parameters as a pytree."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.parser
from google.protobuf.message import DecodeError
from jax import Array
from onnx import AttributeProto, checker, helper, inliner, numpy_helper, shape_inference

from jrnn.errors import FormatError, OpError, check_known, near
from jrnn.files import new_file
from jrnn.files.reading import available
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.proto.codec import file_bytes
from jrnn.nets.proto.messages import DEFAULT_LIMITS
from jrnn.onnx.expand import STANDARD, constants_of, expanded, nodes_of, opset_of, schema_of
from jrnn.onnx.graph import KEY, OPERATORS, OnnxGraph, Values, as_jax, read_graph, run_graph, unused


@dataclass(frozen=True)
class Spec:
    """An input or output: its dtype and shape. A size that may vary is a name or None; a sequence has no shape."""

    name: str
    dtype: Any
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name}: {self.dtype or 'a sequence'}"
        sizes = ["?" if size is None else str(size) for size in self.shape]
        return f"{self.name}: {self.dtype}[{', '.join(sizes)}]"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape may be given."""
        if self.shape is None:
            return True
        if len(self.shape) != len(shape):
            return False
        for size, given in zip(self.shape, shape, strict=True):
            if isinstance(size, int) and size != given:
                return False
        return True


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A pure function of inputs and parameters.

    Attributes:
        params: every floating-point constant of rank 1 or more, by its name in the file, preceded by the path of the graph
            if it is inside an If, Loop or Scan, and followed by a number if another has this name. `jax.grad` and
            optimizers work on these.
        inputs, outputs: what the function takes and returns.
    """

    params: dict[str, Array] = field(repr=False)
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    graph: OnnxGraph = field(repr=False)
    proto: onnx.ModelProto = field(repr=False)

    def __call__(
        self,
        inputs: Values,
        params: Values | None = None,
        key: Array | None = None,
    ) -> dict[str, Any]:
        """The outputs by name.

        Args:
            inputs: arrays by name. Integers and booleans that are numpy arrays or Python numbers are known while the
                function is traced, so shapes, branches and numbers of steps may depend on them.
            params: values that replace some or all of the model's own.
            key: of `jax.random.key`, for models that draw random numbers. Without it, nodes with a seed draw by that.

        Raises:
            OpError: inputs that are no dict, or are missing, unknown, or of another type or shape.
            ConversionError: a shape, branch or number of steps that depends on values that are not known; or random numbers
                without a key or a seed.

        Warns:
            UserWarning: a known integer does not fit 32 bits, and `jax_enable_x64` is not set.
        """
        own = self.params
        if not isinstance(inputs, Mapping):
            example = f"model({{{self.inputs[0].name!r}: x}})" if self.inputs else "model({})"
            raise OpError(
                f"inputs are a dict of arrays by name, as in {example}, but are a {type(inputs).__name__}"
            )
        for name in params or ():
            check_known(name, own, OpError, f"no parameter is called {name!r}")
        for name in inputs:
            if name not in (known := [s.name for s in self.inputs]):
                raise OpError(
                    f"no input is called {name!r}{near(name, known)}; the inputs are {known}"
                )
        values = [_checked(spec, inputs) for spec in self.inputs]
        results = run_graph(self.graph, values, {KEY: key}, {**own, **(params or {})}, available())
        outputs = {}
        for spec, value in zip(self.outputs, results):
            if not isinstance(value, list):
                value = as_jax(value, f"the output {spec.name!r}")
            outputs[spec.name] = value
        return outputs

    def save(self, path: str | os.PathLike[str], params: Values | None = None) -> None:
        """Writes the model, with other values of some parameters, such as fine-tuned ones.

        Raises:
            OpError: a parameter that is unknown or of another shape.
            FormatError: if the file cannot be written.
        """
        given = dict(params or {})
        for name, value in given.items():
            if name not in self.params or np.shape(value) != self.params[name].shape:
                raise OpError(
                    f"{name!r} of shape {np.shape(value)} is not a parameter{near(name, self.params)}"
                )
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        _replace(proto.graph, given)
        save_model(proto, path)


def from_onnx(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> OnnxModel:
    """Reads an ONNX model as a pure JAX function with named inputs and outputs and its parameters as a pytree.

    RNN, LSTM, GRU, Loop and Scan run on `jrnn.scan`. The function can be jitted, differentiated and vmapped. Sizes
    that vary are taken from the arrays passed in.

    Args:
        source: the path of a file, which may store its tensors in files next to it; its bytes; or a `ModelProto`.

    Raises:
        FormatError: not a valid ONNX model.
        UnknownOperatorError: an operator that jrnn does not read, with its node and a near name.
        ConversionError: a model that cannot become a JAX function.

    >>> head = '<ir_version: 8, opset_import: ["" : 17]>'
    >>> proto = onnx.parser.parse_model(head + "twice (float[N] x) => (float[N] y) { y = Add(x, x) }")
    >>> model = from_onnx(proto)
    >>> print(model.inputs[0], model({"x": jnp.arange(3.0)})["y"])
    x: float32[N] [0. 2. 4.]
    """
    proto = _load(source)
    # as PyTorch 0.3 wrote; the checker wants 3 with operator sets
    if 0 < proto.ir_version < 3 and proto.opset_import:
        old = proto
        proto = onnx.ModelProto()
        proto.CopyFrom(old)
        proto.ir_version = 3
    try:
        checker.check_model(_checkable(proto))
        if proto.functions:
            proto = inliner.inline_local_functions(proto)
        proto = shape_inference.infer_shapes(proto)
        whole = expanded(proto, {*OPERATORS, "Constant"})
    except (
        checker.ValidationError,
        shape_inference.InferenceError,
        ValueError,
        RuntimeError,
        DecodeError,
    ) as error:
        raise FormatError(f"not a valid ONNX model: {str(error).strip()}") from error
    graph, params = read_graph(whole.graph, opset_of(proto), constants_of(proto.graph))
    names = {i.name: i for i in proto.graph.input}
    return OnnxModel(
        {name: jnp.asarray(value) for name, value in params.items()},
        tuple(_spec(names[name]) for name in graph.inputs),
        tuple(map(_spec, proto.graph.output)),
        graph,
        proto,
    )


def _load(source: Any) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        return source
    if isinstance(source, bytes):
        data = source
    else:
        data = file_bytes(source, DEFAULT_LIMITS)
    try:
        if isinstance(source, bytes):
            return onnx.load_model_from_string(data)
        path = Path(source)
        proto = onnx.load_model_from_string(data, _format(path))
        onnx.load_external_data_for_model(proto, str(path.parent))
        return proto
    except (DecodeError, ValueError, OSError, checker.ValidationError) as error:
        if isinstance(source, bytes):
            where = "the bytes"
        else:
            where = os.fspath(source)
        hint = "; jrnn.read_net reads nets of Caffe2" if where.endswith((".pb", ".pbtxt")) else ""
        raise FormatError(f"{where}: cannot be read as ONNX: {error}{hint}") from error


def _format(path: Path) -> Any:
    return onnx.serialization.registry.get_format_from_file_extension(path.suffix) or "protobuf"


def save_model(proto: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Writes a model in one step; raises FormatError if it cannot be written."""
    with new_file(path, FormatError) as half:
        onnx.save(proto, str(half), _format(Path(path)))


def _checkable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for the checker, which requires what runtimes do without: the shapes of inputs and outputs, and valid schemas.

    onnxruntime adds operators to the standard domain, and torch writes GroupNormalization of a set where it is deprecated.
    """
    opset = opset_of(proto)
    copy = onnx.ModelProto()
    shaped = all(
        v.type.tensor_type.HasField("shape") for v in (*proto.graph.input, *proto.graph.output)
    )
    if shaped and not any(_is_odd(node, opset) for node in nodes_of(proto.graph)):
        return proto
    copy.CopyFrom(proto)
    for value in (*copy.graph.input, *copy.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    for node in nodes_of(copy.graph):
        if _is_odd(node, opset):
            node.domain = "jrnn"
    copy.opset_import.append(helper.make_opsetid("jrnn", 1))
    return copy


def _is_odd(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a node of the standard domain has no valid schema and is read nonetheless."""
    if node.domain in STANDARD:
        schema = schema_of(node.op_type, opset)
    else:
        schema = None
    is_added = schema is None and node.domain in STANDARD and node.op_type in OPERATORS
    return is_added or (schema is not None and schema.deprecated)


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """A size; its name or None if it may vary, for which some exporters write a negative number."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None


def _spec(value: onnx.ValueInfoProto) -> Spec:
    if not value.type.HasField("tensor_type"):
        return Spec(value.name, None, None)
    tensor = value.type.tensor_type
    try:
        dtype = jax.dtypes.canonicalize_dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, TypeError) as error:
        raise FormatError(
            f"{value.name!r} has the element type {tensor.elem_type}, which jrnn does not read"
        ) from error
    shape = tuple(map(_size, tensor.shape.dim))
    return Spec(value.name, dtype, shape if tensor.HasField("shape") else None)


def _checked(spec: Spec, inputs: Values) -> Any:
    if spec.name not in inputs:
        raise OpError(f"the input {spec} is missing")
    value = inputs[spec.name]
    if spec.dtype is None:
        return value
    if not isinstance(value, Array):
        value = np.asarray(value)
    same = jax.dtypes.canonicalize_dtype(value.dtype) == spec.dtype
    if not same or not spec.fits(value.shape):
        raise OpError(f"an array {value.dtype}{list(value.shape)} was given for the input {spec}")
    if is_floating(value):
        return jnp.asarray(value)
    return value


def _replace(graph: onnx.GraphProto, params: Values) -> None:
    """Replaces the values of a graph's parameters, in the order and by the names of `read_graph`."""
    taken: set[str] = set()

    def given(key: str, code: int, dims: Sequence[int], name: str) -> onnx.TensorProto | None:
        """The new value of a constant, if it is a parameter that has one."""
        dtype = helper.tensor_dtype_to_np_dtype(code)
        if not dims or not jnp.issubdtype(dtype, jnp.floating):
            return None
        key = unused(key, taken)
        taken.add(key)
        if key not in params:
            return None
        return numpy_helper.from_array(np.asarray(params[key]).astype(dtype), name)

    def visit(graph: onnx.GraphProto, path: str) -> None:
        for tensor in graph.initializer:
            new = given(path + tensor.name, tensor.data_type, tensor.dims, tensor.name)
            if new is not None:
                tensor.CopyFrom(new)
        for sparse in list(graph.sparse_initializer):
            name = sparse.values.name
            new = given(path + name, sparse.values.data_type, sparse.dims, name)
            if new is not None:  # which may have other elements
                graph.sparse_initializer.remove(sparse)
                graph.initializer.append(new)
        for node in graph.node:
            for a in node.attribute:
                if a.type == AttributeProto.GRAPH:
                    visit(a.g, f"{path}{node.name or node.output[0]}/{a.name}/")
                if node.op_type == "Constant":
                    new = given(path + node.output[0], *_kind(a), "")
                    if new is not None:
                        a.CopyFrom(helper.make_attribute("value", new))

    visit(graph, "")


def _kind(value: AttributeProto) -> tuple[int, Sequence[int]]:
    """The type and sizes of the value of a Constant."""
    if value.type == AttributeProto.TENSOR:
        return value.t.data_type, value.t.dims
    if value.type == AttributeProto.SPARSE_TENSOR:
        return value.sparse_tensor.values.data_type, value.sparse_tensor.dims
    return onnx.TensorProto.FLOAT, [len(value.floats)] * (value.type == AttributeProto.FLOATS)
