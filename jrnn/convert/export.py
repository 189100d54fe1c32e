"""Packages from nets and files, as Caffe2's mobile and predictor exporters write them."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from jrnn.convert.package import Package, fill, placeholder
from jrnn.errors import ConversionError, near
from jrnn.nets.graph import extract_sub_net
from jrnn.nets.ir import Blobs, Net, Op
from jrnn.nets.lowering import infer_shapes
from jrnn.nets.proto.database import (
    DB_READER,
    PredictorFile,
    read_predictor_file,
    write_predictor_file,
)

_LOAD = "Load"


def export_package(
    net: Net, params: Blobs, inputs: Iterable[str], outputs: Iterable[str]
) -> Package:
    """Makes the package that computes `outputs` from `inputs`, as Caffe2's mobile exporter writes it.

    The predict net is the part of `net` that the outputs need; its external inputs begin with `inputs`. The init net fills
    each parameter that this part reads, then each input with a placeholder, a zero of shape [1, 1].

    Args:
        net: the net; training operators that the outputs do not need are left out.
        params: the values of the parameters, by name: float32, int32, int64, int16, bool, uint8, or strings.
        inputs: the blobs that a caller will give.
        outputs: the blobs that a caller wants.

    Raises:
        ConversionError: a blob that is read but neither a parameter nor an input, one that is both, or a parameter of a type
            that no operator fills.
        NetError: a name that is not a blob of the net.

    >>> net = Net("n", (Op.of("FC", ["x", "w", "b"], ["y"]), Op.of("AveragedLoss", ["y"], ["loss"])), ("x", "w", "b"))
    >>> params = {"w": np.ones([1, 2], np.float32), "b": np.zeros(1, np.float32)}
    >>> package = export_package(net, params, ["x"], ["y"])
    >>> [op.type for op in package.predict_net.ops], package.input_names, package.weight_names
    (['FC'], ('x',), ('w', 'b'))
    """
    inputs = tuple(inputs)
    outputs = tuple(outputs)
    for name in inputs:
        if name in params:
            raise ConversionError(
                f"blob {name!r} is given both as an input and as a parameter; choose one"
            )
    predict = extract_sub_net(net, inputs, outputs)
    for name in predict.external_inputs:
        if name not in params and name not in inputs:
            raise ConversionError(
                f"net {net.name!r} reads blob {name!r} to compute {', '.join(map(repr, outputs))}; give its value in "
                f"params, or name it among the inputs{near(name, params)}"
            )
    fills = []
    for name, value in params.items():
        if name in predict.external_inputs:
            fills.append(fill(name, value))
    return Package(Net(net.name + "_init", (*fills, *map(placeholder, inputs))), predict)


def write_predictor(package: Package, path: str | os.PathLike[str], inputs: Blobs) -> None:
    """Writes a package as one minidb file, as Caffe2's predictor exporter does.

    Args:
        package: the package.
        path: the file.
        inputs: arrays, or shapes with dtypes, of the inputs. The file declares the sizes of inputs and outputs.
    """
    input_names = package.input_names
    for name in input_names:
        if name not in inputs:
            raise ConversionError(
                f"inputs must give the shape of {name!r} too; it has {', '.join(inputs) or 'none'}"
            )
    weights = package.weights()

    # The net that fills inputs and outputs with zeros of their sizes.
    shapes = infer_shapes(package.predict_net, {**weights, **inputs})
    sizes = {name: np.shape(inputs[name]) for name in input_names}
    for name in package.output_names:
        if name in shapes:  # strings have no shape
            sizes[name] = shapes[name].shape
    zeros = []
    for name, shape in sizes.items():
        zeros.append(Op.of("ConstantFill", [], [name], shape=list(shape), value=0.0))

    # The net that loads the weights.
    loads = ()
    if weights:
        loads = (Op.of(_LOAD, [DB_READER], weights),)
    model = PredictorFile(
        predict_net=replace(package.predict_net, external_inputs=(*input_names, *weights)),
        predict_init_net=Net("predict-init", tuple(zeros), tuple(sizes)),
        global_init_net=Net("global-init", loads, (DB_READER,), tuple(weights)),
        inputs=input_names,
        outputs=package.output_names,
        parameters=weights,
    )
    write_predictor_file(model, path)


def load_package(path: str | os.PathLike[str]) -> Package:
    """Reads a package: a folder with `init_net.pb` and `predict_net.pb`, or a file of Caffe2's predictor exporter.

    Raises:
        ConversionError: a folder without those files. FormatError: a file that is neither.
    """
    path = Path(path)
    if path.is_dir():
        return Package.load(path)
    model = read_predictor_file(path)
    ends = {*model.inputs, *model.outputs}
    more = [op for op in model.global_init_net.ops if op.type != _LOAD]
    more += [op for op in model.predict_init_net.ops if not ends.issuperset(op.outputs)]
    fills = tuple(fill(name, value) for name, value in model.parameters.items())
    init = Net(model.predict_net.name + "_init", (*fills, *more, *map(placeholder, model.inputs)))
    external_inputs = dict.fromkeys((*model.inputs, *model.predict_net.external_inputs))
    predict = replace(
        model.predict_net,
        external_inputs=tuple(external_inputs),
        external_outputs=model.outputs,
    )
    return Package(init, predict)
