"""Services that track experiments: what each is asked for, and with its package, what it has stored."""

import json
import sqlite3
import sys
from types import SimpleNamespace

import pytest

from jrnn.errors import ConfigError
from jrnn.train.loggers import open_loggers

SERVICES = ["wandb", "trackio", "mlflow"]
STEPS = {1: {"loss": 2.5, "gradient_norm": 0.5}, 2: {"loss": 2.25}}
CONTINUED = {3: {"loss": 2.0}}


class Recorded:
    """Stands for any of the packages, and for a session of it; `calls` are those that have to do with runs."""

    def __init__(self):
        self.calls = []

    def init(self, **options):
        self.calls.append(("start", options["name"], options["project"], options["group"]))
        assert options["config"]["train"]["steps"] == 16
        return self

    def log(self, values, step):
        self.calls.append(("log", step, dict(values)))

    def finish(self):
        self.calls.append(("end",))

    def set_experiment(self, name):
        self.calls.append(("experiment", name))
        return SimpleNamespace(experiment_id="7")

    def MlflowClient(self):
        return self

    def create_run(self, experiment_id, run_name):
        self.calls.append(("start", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="1"))

    def log_param(self, run_id, key, value):
        if key == "train.steps":
            self.calls.append(("parameter", run_id, key, value))

    def log_metric(self, run_id, name, value, step):
        self.calls.append(("log", step, {name: value}))

    def set_terminated(self, run_id):
        self.calls.append(("end",))


def _run(service, make_config, folder):
    """A run of two steps, and its continuation."""
    config = make_config(train={"loggers": [service], "steps": 16})
    for resume_at, steps in ((None, STEPS), (2, CONTINUED)):
        (logger,) = open_loggers(folder, config, resume_at)
        for step, values in steps.items():
            logger.write(step, values)
        logger.close()


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_service_is_asked_for(service, make_config, tmp_path, monkeypatch):
    package = Recorded()
    monkeypatch.setitem(sys.modules, service, package)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    _run(service, make_config, tmp_path / "first")
    if service == "mlflow":
        opened = [("experiment", "jrnn"), ("start", "7", "first")]
        opened.append(("parameter", "1", "train.steps", "16"))
        logged = [("log", 1, {"loss": 2.5}), ("log", 1, {"gradient_norm": 0.5})]
        continued = ("start", "7", "first from step 2")
    else:
        project = "mine" if service == "wandb" else "jrnn"
        opened = [("start", "first", project, "first")]
        logged = [("log", 1, STEPS[1])]
        continued = ("start", "first from step 2", project, "first")
    assert package.calls[: len(opened)] == opened
    assert package.calls[len(opened) :][: len(logged)] == logged
    assert ("log", 2, STEPS[2]) in package.calls and continued in package.calls
    assert package.calls[-2:] == [("log", 3, CONTINUED[3]), ("end",)]
    assert package.calls.count(("end",)) == 2


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_not_installed(service, make_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, service, None)
    config = make_config(train={"loggers": [service]})
    with pytest.raises(ConfigError, match=f"needs the extra '{service}': pip install"):
        open_loggers(tmp_path, config, None)


def test_trackio_stores_the_numbers(make_config, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    _run("trackio", make_config, tmp_path / "first")
    (database,) = tmp_path.rglob("jrnn.db")
    rows = sqlite3.connect(database).execute("SELECT run_name, step, metrics FROM metrics")
    stored = {}
    for name, step, metrics in rows:
        numbers = json.loads(metrics)
        if "loss" in numbers:
            stored[name, step] = numbers["loss"]
    assert stored == {("first", 1): 2.5, ("first", 2): 2.25, ("first from step 2", 3): 2.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, about MLflow
def test_mlflow_stores_the_numbers(make_config, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    _run("mlflow", make_config, tmp_path / "first")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("jrnn").experiment_id
    stored = {}
    for run in client.search_runs([experiment]):
        assert run.data.params["train.steps"] == "16"
        for metric in client.get_metric_history(run.info.run_id, "loss"):
            stored[run.info.run_name, metric.step] = metric.value
    assert stored == {("first", 1): 2.5, ("first", 2): 2.25, ("first from step 2", 3): 2.0}


def test_wandb_stores_the_numbers(make_config, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "first"
    run.mkdir()
    _run("wandb", make_config, run)
    assert sorted(_losses(run)) == [2.0, 2.25, 2.5]


def _losses(run):
    """The losses in the files of Weights & Biases, which it uploads when there is a network."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in run.rglob("*.wandb"):
        data = path.read_bytes()[7:]
        while (
            data
        ):  # records: 4 bytes of checksum, 2 of size, 1 that says whether the record is whole
            size = int.from_bytes(data[4:6], "little")
            if data[6] == 1:
                record = Record.FromString(data[7 : 7 + size])
                for item in record.history.item:
                    if "loss" in (item.key, *item.nested_key):
                        yield json.loads(item.value_json)
            data = data[7 + size :]
