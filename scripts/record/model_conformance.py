"""Checks every family of `jrnn.models` with `jrnn.testing.check_model`, for docs/benchmarks/model_conformance.json.

Where transformers is installed, its models of the same files are checked too.

    python scripts/record/model_conformance.py                   # checks all families
    python scripts/record/model_conformance.py mamba --write     # of one family; --write writes the file
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
from layer_conformance import Notes, write

from jrnn import models
from jrnn.testing import ConformanceReport, check_model
from jrnn.testing.model_properties import MODEL_PROPERTIES

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "models"
TOLERANCE = {"jrnn": 1e-5, "transformers": 1e-4}
CONFIGURATIONS = {"jrnn": 1, "transformers": 2}
# Of transformers: a kernel that refuses these shapes, a cache that the caller makes, and families that it has not.
LEFT_OUT = {"recurrent_gemma", "xlstm", "rwkv6", "rwkv7"}


def theirs(folder: Path) -> Any:
    """The model of transformers; products of groups of experts want sizes that are multiples of 16 bytes."""
    importlib.import_module("glm5_next")  # registers a class
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager"
    ).eval()


def mark(reports: list[ConformanceReport], property: str) -> str:
    if any(property in {f.property for f in report.findings} for report in reports):
        return "**no**"
    return "yes" if any(property in report.holds for report in reports) else "-"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or sorted(models.FAMILIES)
    checks = {"jrnn": models.load}
    versions = [f"jax {jax.__version__}"]
    if importlib.util.find_spec("transformers") is not None:
        checks["transformers"] = theirs
        versions += [
            f"{n} {importlib.import_module(n).__version__}" for n in ("transformers", "torch")
        ]
    rows, notes = [], Notes()
    for name in names:
        marks = []
        for library, load in checks.items():
            cases = range(0 if library != "jrnn" and name in LEFT_OUT else CONFIGURATIONS[library])
            reports = [
                check_model(load(GOLDEN / f"{name}_{k}"), tolerance=TOLERANCE[library])
                for k in cases
            ]
            marks.append([mark(reports, p) for p in MODEL_PROPERTIES])
            for report in reports:
                for f in report.findings:
                    notes.add(library, f"`{name}` of {library}", f.property, f.counterexample)
                    print(f"{library} {name} {f}", flush=True)
        rows.append((f"`{name}`", [" / ".join(dict.fromkeys(both)) for both in zip(*marks)]))
        print(*rows[-1], flush=True)
        jax.clear_caches()  # the system limits how many programs a process may hold
    if "--write" in sys.argv:
        write("model_conformance", versions, ["family", *MODEL_PROPERTIES], rows, notes)


if __name__ == "__main__":
    main()
