"""The target of `jrnn check`: a NetDef, a package, or `MODULE:FUNCTION`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jrnn.convert import example_of, load_function, load_package
from jrnn.errors import FormatError, GradientError
from jrnn.gradcheck.functions import arguments_of, over_time, required, subject_of_function
from jrnn.gradcheck.subject import Subject, subject_of_net
from jrnn.ir import Net
from jrnn.lowering import run_net
from jrnn.proto import read_net

LOSS = "loss"


def subject_of_file(path: str, feeds: Mapping[str, Any], loss: str | None, *, init: str | None, key: Any) -> Subject:
    """A NetDef with its init net, or a package: a folder, or a file of Caffe2's predictor exporter.

    Args:
        feeds: blobs that no init net makes.
        loss: by default `loss` where the net writes such a blob, else all outputs.

    Raises:
        FormatError: for a file that is neither. GradientError, NetError, OpError: as `subject_of_net` does.
    """
    net, blobs = _read(path, init, key)
    if loss is None and any(LOSS in op.outputs for op in net.ops):
        loss = LOSS
    return subject_of_net(net, {**blobs, **feeds}, loss, key=key)


def _read(path: str, init: str | None, key: Any) -> tuple[Net, dict[str, Any]]:
    if init is not None or not Path(path).is_dir():
        try:
            return read_net(Path(path)), {} if init is None else run_net(read_net(Path(init)), {}, key=key)
        except FormatError as e:
            not_a_net = e
        try:
            package = load_package(path)
        except FormatError:
            raise not_a_net from None
    else:
        package = load_package(path)
    return package.predict_net, package.filled(key=key)


def subject_of_target(target: str, feeds: Mapping[str, Any], *, scanned: bool) -> Subject:
    """`MODULE:FUNCTION`: a function of arrays, with them among `feeds`, or one without arguments that gives `(fn, args)` or
    `(fn, args, params)`. `scanned`: it is a step `(..., carry, x) -> (carry, y)`, run over sequences.

    Raises:
        ConversionError: for what is not there or does not convert. GradientError: arguments that are not given.
    """
    params = None
    with jax.enable_x64(False):  # its module is another's code, which makes arrays as it always does
        found = load_function(target)
        if required(found):
            args = tuple(arguments_of(found, feeds))
        elif feeds:
            raise GradientError(
                f"{target} takes no arguments: what it returns is checked; it was given {', '.join(feeds)}"
            )
        else:
            found, args, params = example_of(target, found())
    return subject_of_function(over_time(found) if scanned else found, args, params)
