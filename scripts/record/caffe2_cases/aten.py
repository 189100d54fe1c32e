"""Functions of PyTorch in Caffe2's operator ATen: jrnn/nets/ops/contrib/aten.py."""

import numpy as np

from caffe2_cases import case, i64, integers, normal, positive

X, Y, M, N, IMAGE = (
    normal(2, 3, 4),
    normal(2, 3, 4, seed=1),
    normal(3, 4),
    normal(4, 5),
    normal(1, 4, 3, 4),
)
MASK, PLACES = X > 0, integers(0, 3, 2, 2, 4, dtype=np.int64)
CASES = []


def call(operator, *xs, outputs=1, **args):
    names = [f"x{k}" for k in range(len(xs))]
    outputs = ["out", "places"][:outputs]
    CASES.append(case("ATen", dict(zip(names, xs)), outputs, operator=operator, **args))


# fmt: off
UNARY = (
    "abs", "ceil", "erf", "exp", "expm1", "floor", "neg", "round", "sigmoid", "sign", "sin", "tan",
    "tanh", "trunc", "relu", "t",
)
# fmt: on
for name in UNARY:
    call(name, M)
for name in ["log", "log1p", "log2", "reciprocal", "rsqrt", "sqrt"]:
    call(name, positive(3, 4))
call("acos", np.clip(M, -0.9, 0.9))
for name in ["add", "sub", "mul", "div", "max", "min", "atan2", "eq", "lt", "le", "gt", "ge"]:
    call(name, X, Y)
call("ne", X, M)
call("fmod", X, positive(2, 3, 4))
call("remainder", X, positive(2, 3, 4))
call("pow", positive(3, 4), M)
call("add", X, M, alpha=2.0)
call("sub", X, other=2.0, alpha=0.5)
call("mul", X, other=2.0)
call("div", X, other=3.0)
call("pow", X, exponent=2.0)
for name in ["sum", "mean", "std", "var", "prod", "max"]:
    call(name, X)
call("sum", X, dim=[1], keepdim=0)
call("mean", X, dim=[0, 2], keepdim=1)
call("std", X, dim=[1], unbiased=1, keepdim=0)
call("var", X, dim=[1], unbiased=0, keepdim=0)
call("norm", X, p=2.0)
call("frobenius_norm", X, dim=[1], keepdim=0)
call("logsumexp", X, dim=[1], keepdim=1)
call("max", X, outputs=2, dim=1, keepdim=0)
call("min", X, outputs=2, dim=-1, keepdim=1)
call("all", MASK)
call("any", MASK)
call("cumsum", X, dim=1)
call("cumprod", X, dim=2)
call("sort", X, outputs=2, dim=1, descending=1)
call("sort", X, outputs=2, dim=2, descending=0)
call("topk", X, outputs=2, k=2, dim=2, largest=1, sorted=1)
call("topk", X, outputs=2, k=2, dim=1, largest=0, sorted=1)
call("transpose", X, dim0=0, dim1=2)
call("permute", X, dims=[2, 0, 1])
call("view", X, size=[6, -1])
call("reshape", X, shape=[4, 6])
call("flatten", X, start_dim=1, end_dim=2)
call("expand", M, size=[2, -1, 4], implicit=0)
call("expand_as", M, X)
call("repeat", M, repeats=[2, 1])
call("squeeze", IMAGE)
call("squeeze", IMAGE, dim=1)
call("unsqueeze", X, dim=1)
call("cat", X, Y, dim=1)
call("stack", X, Y, dim=1)
call("select", X, dim=1, index=-1)
call("narrow", X, dim=1, start=1, length=2)
call("index_select", X, i64(2, 0, 1, 1), dim=1)
call("gather", X, PLACES, dim=1, sparse_grad=0)
call("where", MASK, X, Y)
call("masked_fill", X, MASK, value=3.0)
call("triu", M, diagonal=1)
call("tril", M, diagonal=0)
call("flip", X, dims=[1])
call("type_as", i64(1, 2), X)
call("contiguous", X)
call("softmax", X, dim=1)
call("log_softmax", X, dim=2)
call("layer_norm", X, normal(4), normal(4, seed=1), normalized_shape=[4], eps=1e-3, cudnn_enable=1)
call("embedding", M, i64(2, 0, 1, 1), padding_idx=-1, scale_grad_by_freq=0, sparse=0)
call("mm", M, N)
call("mv", M, normal(4))
call("dot", normal(4), normal(4, seed=1))
call("ger", normal(4), normal(3))
call("matmul", X, N)
call("bmm", X, normal(2, 4, 2))
call("addmm", normal(3, 5), M, N, beta=0.5, alpha=2.0)
call("baddbmm", normal(2, 3, 2), X, normal(2, 4, 2), beta=1.0, alpha=1.0)
call("gelu", X)
call("leaky_relu", X, negative_slope=0.1)
call("hardtanh", X, min_val=-0.5, max_val=1.0)
call("softplus", 10 * X, beta=2.0, threshold=5.0)
call("reflection_pad2d", IMAGE, padding=[1, 2, 0, 1])
call("replication_pad2d", IMAGE, padding=[1, 2, 0, 1])
call("adaptive_avg_pool2d", IMAGE, output_size=[2, 3])
call("pixel_shuffle", IMAGE, upscale_factor=2)
