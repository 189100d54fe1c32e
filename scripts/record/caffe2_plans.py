#!/usr/bin/env python3
"""Records plans that the real Caffe2 built and ran, and models that it exported, as golden data for tests.

    python3.8 -m venv caffe2-env
    caffe2-env/bin/pip install torch==1.8.1 "numpy<1.24" future protobuf==3.20.3 six networkx
    PYTHONHASHSEED=0 caffe2-env/bin/python scripts/record/caffe2_plans.py

Writes tests/golden/plans.npz: `NAME|plan` (a serialized PlanDef) and `NAME|out|BLOB` (the tensors of the workspace after
it ran, which begins empty); and for one small model `export|init`, `export|predict` (the mobile exporter's nets),
`export|minidb` (the predictor exporter's file), `export|PARAMETER`, `export|x` and `export|y`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import control, core, workspace
from caffe2.python.predictor import mobile_exporter, predictor_exporter

TARGET = Path(__file__).resolve().parents[2] / "tests" / "golden" / "plans.npz"


def init_net(**bools):
    """i = 0, one = 1, five = 5, ran = 0, and booleans."""
    net = core.Net("init")
    for name, value in (("i", 0), ("one", 1), ("five", 5), ("ran", 0)):
        net.ConstantFill([], name, shape=[], value=value, dtype=core.DataType.INT64)
    for name, value in bools.items():
        net.ConstantFill([], name, shape=[], value=value, dtype=core.DataType.BOOL)
    return net


def count(blob="i", name="count"):
    net = core.Net(name)
    net.Add([blob, "one"], blob)
    return net


def below_five():
    net = core.Net("below_five")
    net.AddExternalOutput(net.LT(["i", "five"], "below"))
    return net


def reached_five():
    net = core.Net("reached_five")
    net.AddExternalOutput(net.GE(["i", "five"], "reached"))
    return net


def step(**fields):
    proto = caffe2_pb2.ExecutionStep()
    substeps = fields.pop("substep", [])
    networks = fields.pop("network", [])
    for name, value in fields.items():
        setattr(proto, name, value)
    proto.substep.extend(substeps)
    proto.network.extend(networks)
    return proto


def raw_plan(name, nets, steps):
    plan = caffe2_pb2.PlanDef(name=name)
    for net_name, net in nets.items():
        plan.network.add().CopyFrom(net.Proto())
        plan.network[-1].name = net_name  # core.Net numbers names apart in the whole process
    plan.execution_step.extend(steps)
    return plan


def built(name, *steps, **bools):
    plan = core.Plan(name)
    plan.AddStep(core.execution_step("start", init_net(**bools)))
    for s in steps:
        plan.AddStep(s)
    return plan.Proto()


def control_plans():
    yield built("for", control.For("f", count(), 3))
    yield built("for_two_nets", control.For("f", [count(), count("ran", "count_ran")], 4))
    yield built("while_net", control.While("w", below_five(), count()))
    yield built(
        "while_not_once",
        control.Do("d", control.For("f", count(), 7), control.While("w", below_five(), count())),
    )
    yield built(
        "while_twice",
        control.While("w", below_five(), count()),
        control.While("v", below_five(), count("ran")),
    )
    yield built("do_while_net", control.DoWhile("w", below_five(), count()))
    yield built(
        "do_while_once", control.For("f", count(), 9), control.DoWhile("w", below_five(), count())
    )
    yield built("until_net", control.Until("u", reached_five(), count()))
    yield built("do_until_net", control.DoUntil("u", reached_five(), count()))
    for flag in (True, False):
        yield built("if_%d" % flag, control.If("c", "flag", count()), flag=flag)
        yield built(
            "if_else_%d" % flag,
            control.If("c", "flag", count(), count("ran", "count_ran")),
            flag=flag,
        )
        yield built(
            "if_not_%d" % flag,
            control.IfNot("c", "flag", count(), count("ran", "count_ran")),
            flag=flag,
        )
        yield built(
            "until_blob_%d" % flag,
            control.DoUntil("u", "flag", [count(), set_flag(True), count("ran", "r")]),
            flag=flag,
        )
    yield built("if_net", control.If("c", below_five(), count(), count("ran", "count_ran")))
    yield built(
        "switch",
        control.Switch(
            "s", ("flag", count()), ("other", count("ran", "r")), (below_five(), count("five", "f"))
        ),
        flag=True,
        other=False,
    )
    yield built(
        "switch_not",
        control.SwitchNot(
            "s", ("flag", count()), ("other", count("ran", "r")), (below_five(), count("five", "f"))
        ),
        flag=True,
        other=False,
    )
    yield built(
        "steps_in_loop",
        control.For("f", [control.For("g", count(), 2), control.Do("d", count("ran", "r"))], 3),
    )
    yield built("parallel", control.DoParallel("p", count(), control.Do("d", count("ran", "r"))))


def set_flag(value):
    return control.BoolNet(("flag", value))


def raw_plans():
    start = step(name="start", network=["init"])
    counts = {"init": init_net(), "count": count()}
    yield raw_plan("num_iter", counts, [start, step(name="s", network=["count"], num_iter=6)])
    yield raw_plan("num_iter_0", counts, [start, step(name="s", network=["count"], num_iter=0)])
    inner = step(name="inner", network=["count"], num_iter=2)
    yield raw_plan("nested", counts, [start, step(name="s", substep=[inner, inner], num_iter=3)])

    nets = {
        "init": init_net(flag=False),
        "count": count(),
        "stop": set_flag(True),
        "ran": count("ran"),
    }
    names = ["count", "stop", "ran"]
    yield raw_plan(
        "stops_within", nets, [start, step(name="s", network=names, should_stop_blob="flag")]
    )
    steps = [step(name=n, network=[n]) for n in names]
    yield raw_plan(
        "stops_between_steps", nets, [start, step(name="s", substep=steps, should_stop_blob="flag")]
    )
    together = step(name="s", substep=steps, should_stop_blob="flag", concurrent_substeps=True)
    yield raw_plan("concurrent_stops_after", nets, [start, together])

    late = core.Net("late")
    late.GE(["i", "five"], "late")
    nets = {**counts, "late": late}
    once = step(name="s", network=["count", "late"], should_stop_blob="late", only_once=True)
    yield raw_plan("only_once", nets, [start, once])
    again = step(name="s", network=["count", "late"], should_stop_blob="late")
    yield raw_plan("stop_blob_unwritten_at_first", nets, [start, again])

    local = core.Net("local")
    local.Add(["i", "one"], "j")
    local.Add(["j", "one"], "i")
    nets = {"init": init_net(), "local": local}
    own = step(name="s", network=["local"], num_iter=2, create_workspace=True)
    yield raw_plan("workspace", nets, [start, own])
    within = step(name="t", network=["local"])
    own = step(name="s", substep=[within], num_iter=2, create_workspace=True)
    yield raw_plan("workspace_above", nets, [start, own])
    yield raw_plan(
        "instances", nets, [start, step(name="s", substep=[within], num_concurrent_instances=3)]
    )
    report = step(name="s", network=["count"], num_iter=2, report_net="ran", report_interval=1000)
    yield raw_plan("report", {**counts, "ran": count("ran")}, [start, report])
    timed = step(name="t", network=["ran"], run_every_ms=100000)
    often = step(name="s", substep=[step(name="u", network=["count"]), timed], num_iter=3)
    yield raw_plan("run_every_ms", {**counts, "ran": count("ran")}, [start, often])
    twice = step(name="s", network=["count", "ran", "count"])
    yield raw_plan("net_twice", {**counts, "ran": count("ran")}, [start, twice])


def export():
    rng = np.random.RandomState(0)
    params = {
        "w": rng.randn(4, 3).astype(np.float32),
        "b": rng.randn(4).astype(np.float32),
        "shift": np.array([2], np.int32),
        "count": np.array([3], np.int64),
        "bytes": np.arange(5, dtype=np.uint8),
        "word": np.array([b"a", b"bc"], dtype=object),
    }
    net = core.Net("model")
    net.FC(["x", "w", "b"], "h")
    net.Tanh("h", "y")
    for k in ("shift", "count", "bytes", "word"):
        net.Copy(k, k + "_copy")
    net.Proto().external_input.extend(sorted(params))
    for name, value in params.items():
        workspace.FeedBlob(name, value)
    x = rng.randn(2, 3).astype(np.float32)
    workspace.FeedBlob("x", x)
    workspace.RunNetOnce(net)
    init, predict = mobile_exporter.Export(workspace, net, sorted(params))
    files = {"init": init.SerializeToString(), "predict": predict.SerializeToString()}
    outputs = ["y", "shift_copy", "count_copy"]
    meta = predictor_exporter.PredictorExportMeta(
        predict_net=net.Proto(), parameters=sorted(params), inputs=["x"], outputs=outputs
    )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.minidb")
        predictor_exporter.save_to_db("minidb", path, meta)
        files["minidb"] = Path(path).read_bytes()
    arrays = {k: np.frombuffer(v, np.uint8) for k, v in files.items()}
    for name, value in params.items():
        arrays[name] = value.astype("S") if value.dtype == object else value
    return {"export|" + k: v for k, v in {**arrays, "x": x, "y": workspace.FetchBlob("y")}.items()}


def main():
    arrays = {}
    for plan in [*control_plans(), *raw_plans()]:
        workspace.ResetWorkspace()
        print(plan.name)
        assert workspace.RunPlan(plan.SerializeToString()), plan.name
        arrays[plan.name + "|plan"] = np.frombuffer(plan.SerializeToString(), np.uint8)
        for blob in sorted(workspace.Blobs()):
            try:
                value = workspace.FetchBlob(blob)
            except Exception:
                continue
            if isinstance(value, np.ndarray) and "/" not in blob:  # not what control.py makes
                arrays["%s|out|%s" % (plan.name, blob)] = value
    workspace.ResetWorkspace()
    arrays.update(export())
    np.savez_compressed(TARGET, **arrays)
    print("%d plans, %d bytes" % (sum(k.endswith("|plan") for k in arrays), TARGET.stat().st_size))


if __name__ == "__main__":
    main()
