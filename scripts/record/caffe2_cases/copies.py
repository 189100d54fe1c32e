"""Copies, what they do to gradients, Scale and Cast."""

import numpy as np
from caffe2.python import utils

from caffe2_cases import case, f32, flags, i32, i64, normal

CASES = [
    case("Copy", {"x": i64(1, 2)}, ["y"]),
    case("Copy", {"x": normal(2, 3)}, ["y"], gradient=True),
    case("CopyOnDeviceLike", {"x": normal(2), "like": i32(1)}, ["y"]),
    case("CopyFromCPUInput", {"x": i32(3)}, ["y"]),
    case("EnsureCPUOutput", {"x": normal(2)}, ["y"]),
    case("Alias", {"x": normal(2, 2)}, ["y"], gradient=True),
    case("AliasWithName", {"x": normal(2, 3)}, ["out"], arg=[utils.MakeArgument("name", "other")]),
    case("EnsureDense", {"x": normal(2, 2)}, ["y"], gradient=True),
    case("StopGradient", {"x": normal(2, 2)}, ["y"]),
    case("ZeroGradient", {"x": normal(2, 2)}, []),
    case("NegateGradient", {"x": normal(2, 2)}, ["y"]),
    case("NegateGradient", {"x": normal(2, 2)}, ["y"], gradient=True),
    case("Scale", {"x": normal(2, 3)}, ["y"], gradient=True, scale=-2.5),
    case("Scale", {"x": normal(3)}, ["x"], gradient=True),
    case("Cast", {"x": f32(1, -2)}, ["y"]),
    case("Cast", {"x": i32(1, -2, 300)}, ["y"], to="float"),
    case("Cast", {"x": flags(True, False)}, ["y"], to=2),
    case("Cast", {"x": normal(4)}, ["y"], gradient=True, to=13, from_type=1),
    case("Cast", {"x": normal(4)}, ["y"], gradient=True, to="float", from_type="float"),
]
for to in (2, 5, 7, 9, 10, 13):
    CASES.append(case("Cast", {"x": np.array([-1.7, 0, 2.5, 100], np.float32)}, ["y"], to=to))
for to in (6, 8):
    CASES.append(case("Cast", {"x": np.array([1.7, 0, 2.5, 100], np.float32)}, ["y"], to=to))
