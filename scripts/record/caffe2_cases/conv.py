"""Convolutions of jrnn/nets/ops/images/convolution.py: dimensions, orders, groups, and all windows."""

from caffe2_cases import case, normal


def conv(type, x, w, bias=False, gradient=True, **args):
    blobs = {"x": normal(*x), "w": normal(*w)}
    if bias:
        blobs["b"] = normal(w[0])
    return case(type, blobs, ["out"], gradient=gradient, **args)


CASES = [
    conv(
        "Conv",
        (2, 3, 5, 4),
        (4, 3, 3, 2),
        bias=True,
        kernel_h=3,
        kernel_w=2,
        stride_h=2,
        stride_w=1,
        pad=1,
    ),
    conv(
        "Conv",
        (2, 3, 5, 4),
        (4, 3, 2, 2),
        kernel=2,
        stride=2,
        dilation=2,
        pad_t=1,
        pad_l=0,
        pad_b=2,
        pad_r=3,
    ),
    conv("Conv", (1, 4, 4, 4), (6, 2, 3, 3), bias=True, kernel=3, group=2, pads=[1, 0, 0, 2]),
    conv("Conv", (1, 4, 4, 4), (4, 1, 3, 3), kernel=3, group=4, pad=1),
    conv(
        "Conv",
        (2, 3, 5, 6),
        (6, 1, 3, 2),
        kernel_h=3,
        kernel_w=2,
        group=3,
        stride=2,
        dilation=2,
        pads=[2, 0, 1, 3],
    ),
    conv("Conv", (1, 4, 5, 3), (6, 2, 2, 1), bias=True, kernel=2, group=3, order="NHWC", stride=2),
    conv("Conv", (1, 3, 7), (3, 1, 3), kernels=[3], group=3, strides=[2], pads=[1, 1]),
    conv("Conv", (2, 5, 4, 3), (4, 2, 2, 3), bias=True, kernel=2, order="NHWC", pad=1),
    conv(
        "Conv",
        (1, 4, 4, 4),
        (6, 3, 3, 2),
        bias=True,
        kernel=3,
        group=2,
        order="NHWC",
        stride=2,
        dilation_h=1,
        dilation_w=1,
    ),
    conv(
        "Conv",
        (1, 2, 7),
        (3, 2, 3),
        bias=True,
        kernels=[3],
        strides=[2],
        dilations=[2],
        pads=[1, 2],
    ),
    conv(
        "Conv",
        (1, 2, 3, 4, 3),
        (2, 2, 2, 3, 1),
        kernels=[2, 3, 1],
        strides=[1, 2, 2],
        pads=[0, 1, 0, 1, 0, 1],
    ),
    conv("Conv", (1, 1, 5, 5), (1, 1, 3, 3), kernel=3, stride=2, legacy_pad=2),
    conv("Conv", (1, 1, 5, 5), (1, 1, 2, 2), kernel=2, stride=3, legacy_pad=1),
    conv("Conv", (1, 1, 4, 4), (1, 1, 2, 2), kernel=2, stride=3, legacy_pad=3, pad=1),
    conv("Conv", (1, 2, 3, 3), (2, 2, 1, 1), bias=True, kernel=1, no_gradient_to_input=1),
    conv("Conv", (0, 2, 3, 3), (2, 2, 2, 2), bias=True, gradient=False, kernel=2),
    conv("Conv1D", (2, 2, 5), (3, 2, 2), bias=True, kernels=[2], pads=[1, 1]),
    conv("Conv1D", (2, 5, 2), (3, 2, 2), kernels=[2], order="NHWC"),
    conv("Conv2D", (1, 2, 4, 4), (3, 2, 2, 2), bias=True, kernels=[2, 2], strides=[2, 2]),
    conv("Conv3D", (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), bias=True, kernels=[2, 2, 2]),
    conv("Conv3D", (1, 3, 3, 3, 2), (2, 2, 1, 2, 1), kernels=[2, 1, 2], order="NHWC", group=2),
]
