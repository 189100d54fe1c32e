"""Transposed convolutions of jrnn/nets/ops/images/convolution.py."""

from caffe2_cases import case, normal


def transposed(x, w, bias=None, gradient=True, **args):
    blobs = {"x": normal(*x), "w": normal(*w)}
    if bias is not None:
        blobs["b"] = normal(bias)
    return case("ConvTranspose", blobs, ["out"], gradient=gradient, **args)


CASES = [
    transposed(
        (2, 3, 3, 2),
        (3, 4, 3, 2),
        4,
        kernel_h=3,
        kernel_w=2,
        stride_h=2,
        stride_w=3,
        adj_h=1,
        adj_w=2,
    ),
    transposed((1, 2, 3, 3), (2, 3, 3, 3), kernel=3, stride=2, pad=1, adj=1),
    transposed(
        (1, 2, 3, 3), (2, 3, 2, 2), 3, kernel=2, pad_t=0, pad_l=1, pad_b=1, pad_r=0, stride=2
    ),
    transposed((1, 4, 3, 3), (4, 2, 2, 2), 4, kernel=2, group=2, stride=2),
    transposed(
        (1, 3, 3, 2),
        (2, 2, 2, 3),
        3,
        kernels=[2, 2],
        strides=[2, 1],
        pads=[1, 0, 0, 0],
        order="NHWC",
    ),
    transposed((1, 3, 4, 3), (3, 1, 3, 3), 3, kernel=3, group=3, stride=2, pad=1, adj=1),
    transposed((1, 3, 3, 4), (4, 2, 2, 3), kernel=2, group=2, order="NHWC", adjs=[0, 0]),
    transposed((1, 2, 3, 3), (2, 3, 2, 2), kernel=2, stride=2, legacy_pad=2),
    transposed((1, 2, 2, 2), (2, 3, 1, 1), 3, kernel=1, no_gradient_to_input=1),
    transposed((0, 2, 2, 2), (2, 3, 2, 2), 3, gradient=False, kernel=2),
]
