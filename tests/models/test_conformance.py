"""`jrnn.testing.check_model` on every family, and on families with the faults of planted_faults.toml.

docs/conformance.md has the scoreboard, which scripts/record/model_conformance.py writes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jrnn
from jrnn import models
from jrnn.cli import main, nets
from jrnn.testing import check_model
from jrnn.testing.model_properties import MODEL_PROPERTIES

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "models"
FAULTS = tomllib.loads((HERE / "planted_faults.toml").read_text(encoding="utf-8"))
PROGRAM = """
import json, pathlib, sys, jax
from jrnn import models
from jrnn.testing import check_model
jax.config.update("jax_disable_most_optimizations", True)
only = json.loads(sys.argv[2])
for folder in sys.argv[3:]:
    report = check_model(models.load(pathlib.Path(sys.argv[1]) / folder), only=only)
    print(json.dumps([list(report.holds), [str(f) for f in report.findings], report.skipped]))
"""
ABSENT = {
    "the model has no recurrent state",
    "the model has no window of a convolution",
    "the model has no attention",
}


def reports(folders, only=None, package=None):
    """What holds, what is found and what is skipped, of each folder, with two devices, in a process of its own."""
    package = Path(jrnn.__file__).parents[1] if package is None else package
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "PYTHONPATH": str(package), "XLA_FLAGS": flags}
    program = [
        sys.executable,
        "-P",
        "-c",
        PROGRAM,
        str(GOLDEN),
        json.dumps(only),
        *folders,
    ]  # -P: not this folder's jrnn
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("little_optimization")
@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_a_family_has_every_property(family):
    report = check_model(models.load(GOLDEN / f"{family}_0"))
    assert not report.findings, report
    assert {why for name, why in report.skipped.items() if name != "devices"} <= ABSENT, report


@pytest.mark.exhaustive
def test_time_over_devices_equals_one_device():
    for holds, findings, skipped in reports(
        [f"{name}_0" for name in sorted(models.FAMILIES)], ["devices"]
    ):
        assert holds == ["devices"], (findings, skipped)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    wanted, family, file, line, wrong = FAULTS[fault].values()
    shutil.copytree(
        Path(jrnn.__file__).parent, tmp_path / "jrnn", ignore=shutil.ignore_patterns("__pycache__")
    )
    changed = tmp_path / "jrnn" / file
    text = changed.read_text(encoding="utf-8")
    assert text.count(line) == 1, f"{file} has {text.count(line)} lines {line!r}"
    changed.write_text(text.replace(line, wrong), encoding="utf-8")
    ((_, findings, _),) = reports([family], package=tmp_path)
    assert [finding.partition(":")[0] for finding in findings] == wanted


@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_of_a_fault_is_in_the_package_once(fault):
    text = (Path(jrnn.__file__).parent / FAULTS[fault]["file"]).read_text(encoding="utf-8")
    assert text.count(FAULTS[fault]["line"]) == 1


def test_the_faults_are_of_properties():
    assert {name for fault in FAULTS.values() for name in fault["properties"]} <= set(
        MODEL_PROPERTIES
    )


def test_the_command_checks_a_folder(monkeypatch, capsys):
    folder = str(GOLDEN / "mamba_0")
    monkeypatch.setattr(
        nets,
        "check_model",
        lambda model: check_model(model, only=["determinism", "packed attention"]),
    )
    assert main(["check", folder]) == 0
    text = "holds: determinism\nnot checked: packed attention, because the model has no attention\n"
    assert capsys.readouterr().out == text
    assert main(["check", folder, "--loss", "x"]) == 2
    assert "--loss is for gradients; " in capsys.readouterr().err
