"""Collective operators on one process: what a data-parallel net of several replicas computes, and the errors."""

import jax
import numpy as np
import pytest

import jrnn
from jrnn import Net
from jrnn.errors import GradientError, NetError, OpError
from jrnn.nets import Op

A, B = np.float32([[1, 2], [3, 4]]), np.float32([[10, 20], [30, 40]])
WORLD = Op.of("CreateCommonWorld", ["store"], ["world"], size=1, rank=0)
INIT = Net("init", (Op.of("FileStoreHandlerCreate", [], ["store"], path="/nowhere"), WORLD))
RESULTS = {  # type, what it is given besides the replicas a and b, its outputs, and their values
    "Allreduce": (["world"], ["a", "b"], {}, (A + B, A + B)),
    "Broadcast": (["world"], ["a", "b"], {}, (A, A)),
    "Allgather": (["world"], ["y"], {}, ([1, 2, 3, 4, 10, 20, 30, 40],)),
    "NCCLAllreduce": ([], ["a", "b"], {}, (A + B, A + B)),
    "NCCLBroadcast": ([], ["a", "b"], {"root": 1}, (B, B)),
    "NCCLReduce": ([], ["a"], {"root": 0}, (A + B,)),
    "NCCLAllGather": ([], ["x", "y"], {}, (np.stack([A, B]), np.stack([A, B]))),
    "NCCLReduceScatter": ([], ["x", "y"], {}, ((A + B)[0], (A + B)[1])),
}


@pytest.fixture(scope="module")
def world():
    return jrnn.run_net(INIT, {})["world"]


@pytest.mark.parametrize("type", RESULTS)
def test_replicas_are_combined(type, world):
    given, outputs, arguments, expected = RESULTS[type]
    net = Net("n", (Op.of(type, [*given, "a", "b"], outputs, **arguments),))
    blobs = {"a": A, "b": B, "world": world}
    for results in (jrnn.run_net(net, blobs), jax.jit(jrnn.to_jax(net, outputs))(blobs)):
        for name, value in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(results[name], value)
    with pytest.raises(GradientError, match=f"{type} has no gradient"):
        jrnn.add_gradients(net, outputs[:1])


def test_a_process_alone(world):
    ops = (
        Op.of("CloneCommonWorld", ["world"], ["other"]),
        Op.of("Barrier", ["other"], []),
        Op.of("Reduce", ["world", "a"], ["sum"], root=0),
        Op.of("DestroyCommonWorld", ["world"], ["world"]),
    )
    assert jrnn.run_net(Net("n", ops), {"a": A, "world": world})["sum"].tolist() == A.tolist()
    with pytest.raises(NetError, match="'world', which DestroyCommonWorld -> 'world' has freed"):
        jrnn.run_net(Net("n", (*ops, Op.of("Barrier", ["world"], []))), {"a": A, "world": world})


def test_a_step_of_data_parallel_training_is_that_of_the_whole_batch(world):
    """Two replicas of w, each with the mean loss of its half, as Caffe2's data_parallel_model writes a net."""

    def net(devices):
        ops = []
        for d in devices:
            ops += [
                Op.of("FC", [f"gpu_{d}/x", f"gpu_{d}/w", f"gpu_{d}/b"], [f"gpu_{d}/y"]),
                Op.of("SquaredL2Distance", [f"gpu_{d}/y", f"gpu_{d}/t"], [f"gpu_{d}/d"]),
                Op.of("AveragedLoss", [f"gpu_{d}/d"], [f"gpu_{d}/mean"]),
                Op.of("Scale", [f"gpu_{d}/mean"], [f"gpu_{d}/loss"], scale=1 / len(devices)),
            ]
        full, gradients = jrnn.add_gradients(
            Net("n", tuple(ops)), [f"gpu_{d}/loss" for d in devices]
        )
        grads = [gradients[f"gpu_{d}/w"] for d in devices]
        shared = [
            Op.of("NCCLAllreduce", grads, grads),
            Op.of("Allreduce", ["world", grads[0]], grads[:1]),
        ]
        return Net("n", (*full.ops, *shared)), grads

    rng = np.random.default_rng(0)
    x, t, w, b = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((6, 3), (6, 2), (2, 3), (2,))
    )
    results = []
    for devices in ([0], [0, 1]):
        rows = dict(zip(devices, np.split(np.arange(6), len(devices))))
        blobs = {"world": world}
        for d in devices:
            blobs |= {
                f"gpu_{d}/x": x[rows[d]],
                f"gpu_{d}/t": t[rows[d]],
                f"gpu_{d}/w": w,
                f"gpu_{d}/b": b,
            }
        train, grads = net(devices)
        results += [jrnn.run_net(train, blobs)[g] for g in grads]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    np.testing.assert_array_equal(results[1], results[2])


REFUSED = {
    "other processes": (
        Op.of("CreateCommonWorld", [], ["y"], size=4, rank=1),
        "size 4 and rank 1 ask for other processes",
    ),
    "another root": (
        Op.of("Broadcast", ["world", "a"], ["a"], root=1),
        "argument 'root' is 1; it must be from 0 to 0",
    ),
    "no world": (
        Op.of("Allreduce", ["a", "b"], ["b"]),
        r"must be a common world, made by CreateCommonWorld; it is float32",
    ),
    "shapes": (
        Op.of("Allreduce", ["world", "a", "row"], ["a", "row"]),
        r"combines float32\[2,2\] and float32\[2\]",
    ),
    "outputs": (Op.of("NCCLAllreduce", ["a", "b"], ["a"]), "combines 2 replicas and has 1 outputs"),
    "rows": (Op.of("NCCLReduceScatter", ["a"], ["a"]), "must have a row for each of 1 replicas"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_process_cannot_do_is_refused(name, world):
    op, message = REFUSED[name]
    with pytest.raises(OpError, match=message):
        jrnn.run_net(Net("n", (op,)), {"a": A, "b": B, "row": A[0], "world": world})
