"""Packages as Caffe2's exporters write them: recorded nets and files, round trips, hostile bytes, serving."""

import pathlib
import struct
from dataclasses import replace

import jax
import numpy as np
import pytest

import jrnn
from jrnn import Net
from jrnn.convert import (
    Package,
    Predictor,
    export_package,
    load_package,
    write_predictor,
)
from jrnn.convert import package as package_module
from jrnn.errors import ConversionError, FormatError, NetError, OpError
from jrnn.nets import Op
from jrnn.nets.proto import Limits, message_class
from jrnn.nets.proto.database import format_minidb, parse_minidb, read_predictor_file

pytestmark = pytest.mark.usefixtures("little_compilation")

FILE = np.load(pathlib.Path(__file__).parents[1] / "golden" / "plans.npz")
GOLDEN = {k.removeprefix("export|"): FILE[k] for k in FILE.files if k.startswith("export|")}
MINIDB = GOLDEN["minidb"].tobytes()
X, Y = GOLDEN["x"], GOLDEN["y"]
PARAMS = {k: GOLDEN[k] for k in ("b", "bytes", "count", "shift", "w")} | {
    "word": np.array([b"a", b"bc"], object)
}
COPIES = ("shift", "count", "bytes", "word")
NET = Net(
    "model",
    (
        Op.of("FC", ["x", "w", "b"], ["h"]),
        Op.of("Tanh", ["h"], ["y"]),
        *(Op.of("Copy", [n], [n + "_copy"]) for n in COPIES),
        Op.of("AveragedLoss", ["y"], ["loss"]),
    ),
    ("x", "w", "b", *COPIES),
    ("loss",),
)
OUTPUTS = ["y", *(n + "_copy" for n in COPIES)]


def bare(net):
    """A net without what does not change its meaning in serialized operators, such as names that are set and empty."""
    return replace(net, ops=tuple(replace(op, extra=b"") for op in net.ops), extra=b"")


def same_weights(package):
    weights = package.weights()
    assert sorted(weights) == sorted(PARAMS)
    for name, value in PARAMS.items():
        assert weights[name].dtype == value.dtype and np.array_equal(weights[name], value), name


def test_export_is_what_caffe2_exports():
    package = export_package(NET, PARAMS, ["x"], OUTPUTS)
    assert package.init_net.ops == bare(jrnn.read_net(GOLDEN["init"].tobytes())).ops
    recorded = bare(jrnn.read_net(GOLDEN["predict"].tobytes()))
    assert package.predict_net == recorded
    assert package.input_names == ("x",) and package.output_names == tuple(OUTPUTS)
    same_weights(package)


def test_caffe2s_mobile_package_is_read(tmp_path):
    for name in ("init", "predict"):
        (tmp_path / f"{name}_net.pb").write_bytes(GOLDEN[name].tobytes())
    package = load_package(tmp_path)
    assert package.input_names == ("x",) and package.weight_names == tuple(PARAMS)
    same_weights(package)
    np.testing.assert_allclose(package.to_jax()({"x": X})["y"], Y, rtol=1e-6)


def test_a_folder_round_trip(tmp_path):
    package = export_package(NET, PARAMS, ["x"], OUTPUTS)
    package.save(tmp_path / "model")
    assert load_package(tmp_path / "model") == package
    with pytest.raises(ConversionError, match=r"has no init_net\.pb"):
        load_package(tmp_path)


def test_caffe2s_predictor_file_is_read(tmp_path):
    (tmp_path / "model.minidb").write_bytes(MINIDB)
    package = load_package(tmp_path / "model.minidb")
    assert package.input_names == ("x",) and package.output_names == (
        "y",
        "shift_copy",
        "count_copy",
    )
    same_weights(package)
    got = Predictor(package)(X)
    np.testing.assert_allclose(got["y"], Y, rtol=1e-6)
    assert got["count_copy"].tolist() == [3] and got["shift_copy"].tolist() == [2]


def test_what_is_written_is_what_caffe2_writes(tmp_path):
    path = tmp_path / "model.minidb"
    write_predictor(
        export_package(NET, PARAMS, ["x"], ["y", "shift_copy", "count_copy"]), path, {"x": X}
    )
    ours, theirs = read_predictor_file(path), read_predictor_file(MINIDB)
    assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
    assert bare(ours.predict_init_net) == bare(theirs.predict_init_net)
    assert ours.global_init_net.ops[0].type == "Load"
    assert ours.global_init_net.ops[0].inputs == theirs.global_init_net.ops[0].inputs
    assert ours.predict_net.ops == bare(theirs.predict_net).ops[:4]
    keys = [k for k, _ in parse_minidb(path.read_bytes())]
    assert keys[0] == parse_minidb(MINIDB)[0][0] and b"w#%0" in keys


@pytest.mark.exhaustive
def test_big_parameters_travel_in_chunks(tmp_path):
    w = np.arange(2_100_000, dtype=np.float32).reshape(3, -1)
    package = export_package(
        Net("big", (Op.of("Add", ["w", "x"], ["y"]),), ("w", "x")), {"w": w}, ["x"], ["y"]
    )
    path = tmp_path / "big.minidb"
    write_predictor(package, path, {"x": np.ones(1, np.float32)})
    assert [k for k, _ in parse_minidb(path.read_bytes())][1:] == [b"w#%0", b"w#%1", b"w#%2"]
    assert np.array_equal(load_package(path).weights()["w"], w)


def test_an_lstm_is_exported_and_served(tmp_path):
    b = jrnn.NetBuilder("lstm")
    lstm = jrnn.nets.cells.LSTM(b, b.input("x"), b.input("lengths"), None, 3, 4, "rnn")
    net = b.build(outputs=[lstm.hidden_all])
    params = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    data = {"x": np.ones((5, 2, 3), np.float32), "lengths": np.array([5, 3], np.int32)}
    want = jrnn.run_net(net, {**params, **data})[lstm.hidden_all]
    package = export_package(net, params, ["x", "lengths"], [lstm.hidden_all])
    package.save(tmp_path)
    write_predictor(package, tmp_path / "lstm.minidb", data)
    for path in (tmp_path, tmp_path / "lstm.minidb"):
        predict = Predictor(load_package(path))
        np.testing.assert_allclose(predict(**data)[lstm.hidden_all], want, rtol=1e-5, atol=1e-7)


def test_a_predictor_compiles_once_a_shape(monkeypatch):
    traces = []

    def counting(net, outputs):
        run = jrnn.to_jax(net, outputs)
        return lambda blobs: traces.append(1) or run(blobs)

    monkeypatch.setattr(package_module, "to_jax", counting)
    predict = Predictor(export_package(NET, PARAMS, ["x"], ["y"]))
    for rows in (2, 2, 3, 2, 3):
        np.testing.assert_allclose(
            predict(X[:1].repeat(rows, 0))["y"], Y[:1].repeat(rows, 0), rtol=1e-6
        )
    assert len(traces) == 2


def test_a_predictor_says_what_it_needs():
    predict = Predictor(export_package(NET, PARAMS, ["x"], ["y"]))
    for call, message in (
        (lambda: predict(), "'x' is missing"),
        (lambda: predict(X, X), "2 inputs were given, but the package has 1"),
        (lambda: predict(X, x=X), "given twice"),
        (lambda: predict(X, xx=X), "no input 'xx'; did you mean 'x'"),
    ):
        with pytest.raises(ConversionError, match=message):
            call()
    with pytest.raises(OpError, match="FC -> 'h'"):
        predict(X[:, :2])


def test_refused_exports():
    with pytest.raises(
        ConversionError, match="reads blob 'w' to compute 'y'; give its value in params"
    ):
        export_package(NET, {"b": PARAMS["b"]}, ["x"], ["y"])
    with pytest.raises(ConversionError, match="'x' is given both as an input and as a parameter"):
        export_package(NET, {**PARAMS, "x": X}, ["x"], ["y"])
    with pytest.raises(ConversionError, match="parameter 'w' is float64, which no operator fills"):
        export_package(NET, {**PARAMS, "w": PARAMS["w"].astype(np.float64)}, ["x"], ["y"])
    with pytest.raises(NetError, match="no blob 'z'"):
        export_package(NET, PARAMS, ["x"], ["z"])
    with pytest.raises(ConversionError, match="must give the shape of 'x'"):
        write_predictor(export_package(NET, PARAMS, ["x"], ["y"]), "unused", {})


def test_zero_weights_of_one_element_are_no_placeholders():
    ops = (Op.of("Mul", ["x", "w"], ["y"]),)
    fill = Op.of("GivenTensorFill", [], ["w"], shape=[1, 1], values=[0.0])
    package = Package(Net("init", (fill,)), Net("n", ops, ("x", "w"), ("y",)))
    assert package.weight_names == ("w",) and package.input_names == ("x",)
    both = export_package(
        Net("n", ops, ("x", "w")), {"w": np.zeros((1, 1), np.float32)}, ["x"], ["y"]
    )
    assert both.weight_names == ("w",) and both.input_names == ("x",)


def test_minidb_sizes_are_checked_before_they_are_believed():
    for head in ((2**31 - 1, 2**31 - 1), (-1, 5), (5, -1), (0, 4), (3, 1000)):
        with pytest.raises(FormatError, match="minidb: the record at byte 0 has a key of"):
            parse_minidb(struct.pack("<ii", *head) + b"abcdefgh")
    with pytest.raises(FormatError, match="truncated: 3 bytes remain"):
        parse_minidb(format_minidb([(b"k", b"v")]) + b"abc")
    with pytest.raises(FormatError, match="more than the limit of 2 records"):
        parse_minidb(format_minidb([(b"k", b"v")] * 3), Limits(messages=2))


def test_damaged_predictor_files_end_in_a_format_error():
    refused = 0
    for at in range(len(MINIDB)):
        changed = bytearray(MINIDB)
        changed[at] ^= 0x80
        for damaged in (bytes(changed), MINIDB[:at]):
            try:
                read_predictor_file(damaged)
            except FormatError:
                refused += 1
    assert refused > len(MINIDB)


def test_predictor_files_that_lack_something(tmp_path):
    records = parse_minidb(MINIDB)
    with pytest.raises(FormatError, match="has no record !!META_NET_DEF"):
        read_predictor_file(format_minidb(records[1:]))
    with pytest.raises(FormatError, match="no record for the parameter 'w'"):
        read_predictor_file(format_minidb(r for r in records if not r[0].startswith(b"w#")))
    with pytest.raises(FormatError, match="no such file"):
        load_package(tmp_path / "none")

    meta = message_class("MetaNetDef").FromString(
        message_class("BlobProto").FromString(records[0][1]).content
    )

    def with_meta():
        holder = message_class("BlobProto")(content=meta.SerializeToString())
        return read_predictor_file(
            format_minidb([(records[0][0], holder.SerializeToString()), *records[1:]])
        )

    meta.nets[2].key = "PREDICT_NET_TYPE_second"  # a model with a name
    assert with_meta().predict_net.ops
    meta.nets[0].key = "PREDICT_NET_TYPE_first"
    with pytest.raises(
        FormatError, match="several models: PREDICT_NET_TYPE_first, PREDICT_NET_TYPE_second"
    ):
        with_meta()
    del meta.nets[:]
    with pytest.raises(FormatError, match="no PREDICT_NET_TYPE"):
        with_meta()


FC = (Op.of("FC", ["data", "w", "b"], ["y"]),)
FILLS = (
    Op.of("GivenTensorFill", [], ["w"], shape=[2, 3], values=[1.0] * 6),
    Op.of("GivenTensorFill", [], ["b"], shape=[2], values=[0.5, -0.5]),
)


@pytest.mark.parametrize(
    "fill, because",
    [
        (
            Op.of("ConstantFill", [], ["data"], shape=[1]),
            "a single number, before the first weight",
        ),
        (
            Op.of("GivenTensorFill", [], ["data"], shape=[1, 3], values=[0.0, 1.0, 2.0]),
            "the first operator, FC, reads it",
        ),
    ],
    ids=["number", "example"],
)
def test_inputs_that_the_init_net_fills(fill, because, tmp_path):
    """Caffe's translator fills an input with a number, exporters of PyTorch's day with the example they traced."""
    Package(Net("init", (fill, *FILLS)), Net("predict", FC, ("data", "w", "b"))).save(tmp_path)
    package = load_package(tmp_path)
    assert package.weight_names == ("w", "b") and package.output_names == ("y",)
    assert list(package.inputs) == ["data"] and because in package.inputs["data"]
    predict = Predictor(package)
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    for got in (predict(x), predict(data=x), package.to_jax()({"data": x})):
        np.testing.assert_array_equal(got["y"], [[6.5, 5.5]])
    zeros = np.zeros((2, 3), np.float32)
    np.testing.assert_array_equal(
        predict(x, w=zeros)["y"], [[0.5, -0.5]]
    )  # any blob that the init net fills
    with pytest.raises(ConversionError, match="no input 'dat'; did you mean 'data'"):
        predict(dat=x)


def test_an_example_serves_where_nothing_is_given():
    example = Op.of("GivenTensorFill", [], ["data"], shape=[1, 3], values=[0.0, 1.0, 2.0])
    predict = Predictor(
        Package(Net("init", (example, *FILLS)), Net("predict", FC))
    )  # which declares nothing
    np.testing.assert_array_equal(predict()["y"], [[3.5, 2.5]])


def test_inputs_that_nothing_fills_come_alone():
    """Next to those, a single number or the first operator's input is a weight."""
    ops = (Op.of("Mul", ["s", "x"], ["y"]),)
    one = Op.of("ConstantFill", [], ["s"], shape=[1], value=2.0)
    package = Package(Net("init", (one,)), Net("n", ops, ("s", "x"), ("y",)))
    assert package.inputs == {"x": "the init net does not fill it"} and package.weight_names == (
        "s",
    )


def test_the_text_of_a_package_is_short():
    package = jrnn.from_jax(
        lambda x: x @ np.arange(9000, dtype=np.float32).reshape(3, 3000), np.ones(3, np.float32)
    )
    assert len(repr(package)) < 200 and "inputs ['x'], outputs ['output']" in repr(package)
    assert repr(jrnn.convert.Predictor(package)) == f"Predictor({package!r})"
