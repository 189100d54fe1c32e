"""Packages from nets and files, as Caffe2's mobile and predictor exporters write them; the files of Python modules."""

import io
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.convert.package import INIT, PREDICT, Package, fill, placeholder
from jrnn.errors import ConversionError, FormatError, near
from jrnn.files import reporting, write_whole
from jrnn.nets.graph import extract_sub_net
from jrnn.nets.ir import Net, Op
from jrnn.nets.lowering import infer_shapes
from jrnn.nets.proto import read_net
from jrnn.nets.proto.database import (
    DB_READER,
    PredictorFile,
    read_predictor_file,
    write_predictor_file,
)

_LOAD = "Load"
_LONGEST_MEMBER = 60_000  # bytes; the format of zip files allows 65,535


def export_package(
    net: Net, params: Mapping[str, Any], inputs: Iterable[str], outputs: Iterable[str]
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
    read = [n for n in predict.external_inputs if n not in inputs]
    for name in read:
        if name not in params:
            raise ConversionError(
                f"net {net.name!r} reads blob {name!r} to compute {', '.join(map(repr, outputs))}; give its value in "
                f"params, or name it among the inputs{near(name, params)}"
            )
    fills = tuple(fill(name, params[name]) for name in params if name in read)
    return Package(Net(net.name + "_init", (*fills, *map(placeholder, inputs))), predict)


def write_predictor(
    package: Package, path: str | os.PathLike[str], inputs: Mapping[str, Any]
) -> None:
    """Writes a package as one minidb file, as Caffe2's predictor exporter does.

    Args:
        package: the package.
        path: the file.
        inputs: arrays, or shapes with dtypes, of the inputs. The file declares the sizes of inputs and outputs.
    """
    missing = [n for n in package.input_names if n not in inputs]
    if missing:
        raise ConversionError(
            f"inputs must give the shape of {missing[0]!r} too; it has {', '.join(inputs) or 'none'}"
        )
    weights = package.weights()
    shapes = infer_shapes(package.predict_net, {**weights, **inputs})
    ends = {n: tuple(np.shape(inputs[n])) for n in package.input_names}
    ends |= {
        n: tuple(shapes[n].shape) for n in package.output_names if n in shapes
    }  # strings have none
    zeros = tuple(
        Op.of("ConstantFill", [], [n], shape=list(shape), value=0.0) for n, shape in ends.items()
    )
    load = Op.of(_LOAD, [DB_READER], list(weights))
    model = PredictorFile(
        predict_net=replace(package.predict_net, external_inputs=(*package.input_names, *weights)),
        predict_init_net=Net("predict-init", zeros, tuple(ends)),
        global_init_net=Net(
            "global-init", (load,) if weights else (), (DB_READER,), tuple(weights)
        ),
        inputs=package.input_names,
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
    reads = dict.fromkeys((*model.inputs, *model.predict_net.external_inputs))
    return Package(
        init,
        replace(model.predict_net, external_inputs=tuple(reads), external_outputs=model.outputs),
    )


def read_nets(path: str | Path, init: str | Path | None = None) -> Package:
    """Reads the package in a folder, or the net in a file with the init net in another."""
    path = Path(path)
    if path.is_dir():
        if init is not None:
            raise ConversionError(
                f"{path} is a folder, whose {INIT} fills the weights; to use another, give {path / PREDICT}"
            )
        return Package.load(path)
    return Package(read_net(Path(init)) if init is not None else Net("init"), read_net(path))


def put_module(path: Path, source: bytes, data: bytes, ending: str) -> None:
    """Writes the module and its weights. The weights come first, under a name that no module has that was written before."""
    with reporting(path, FormatError):
        base = path.name.removesuffix(".py")
        weights = path.with_name(base + ending)
        others = [
            p
            for p in path.parent.glob("*.npz")
            if re.fullmatch(re.escape(base) + r"-[0-9a-f]{12}\.npz", p.name)
        ]
    write_whole(weights, data, FormatError)
    try:
        write_whole(path, source, FormatError)
    except BaseException:
        if weights not in others:
            weights.unlink()
        raise
    with reporting(path, FormatError):
        for other in {*others} - {weights}:
            other.unlink(missing_ok=True)


def npz_of(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A file of arrays that `np.load` reads. `np.savez` has parameters of its own, whose names no array may have."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, array in arrays.items():
            member = f"{name}.npy"
            if (
                not name
                or "\0" in name
                or len(member.encode()) > _LONGEST_MEMBER
                or member in arrays
            ):
                raise ConversionError(
                    f"weight {name[:60]!r} cannot be stored in a .npz file: a name has 1 to {_LONGEST_MEMBER} bytes, "
                    "no zero byte, and is not that of another weight with .npy; rename the blob"
                )
            with archive.open(zipfile.ZipInfo(member), "w", force_zip64=True) as opened:
                np.lib.format.write_array(opened, array, allow_pickle=False)
    return written.getvalue()
