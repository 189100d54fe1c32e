"""The tests of other libraries, each one plain and marked by `jrnn.optimize_scans(everywhere=True)` in the same process.

    python -m venv world
    world/bin/pip install . 'pytest<9' pytest-cases dynamax numpyro funsor tinygp cuthbert probdiffeq diffeqzoo matfree \\
        jaxley flax optax spyx memax brainstate braintools equinox diffrax jnkepler scikit-learn 'setuptools<81'
    world/bin/pip install --no-deps keras namex optree dm-haiku jmp tabulate distrax rlax dm_env recurrentgemma gymnax \\
        gymnasium farama-notifications bsuite frozendict hypothesis sortedcontainers parameterized  # their pins disagree
    git clone --depth 1 https://github.com/probml/dynamax libraries/dynamax       # and those that --list names
    world/bin/python scripts/world_suites.py libraries [NAME ...]

A line for each suite: tests that pass plain and marked, those that newly fail, ratios of marked over plain in processor time
of the tests, of lowering and of compilation, and how each loop ran; then the sums. Each test runs twice in turn,
plain first or marked first and without compiled functions, so that neither the load of the machine nor what ran before
decides the ratios. A test that fails marked and passes plain runs alone once more, both ways. It exits with 1 if one fails
again. With --json FOLDER, each suite has a record there: its outcomes, and the reasons for each loop. --rewrite tests
harder: it rewrites short loops too, and writes all small linear algebra as arithmetic, whatever that costs.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The checkout of probdiffeq needs the file _version.py of the installed package, and jnkepler setuptools below 81.
# name: repository, every k-th test, arguments of pytest relative to the checkout. "installed" takes only the tests from it.
SUITES: dict[str, tuple[str, int, str]] = {
    "dynamax-ssm": (
        "probml/dynamax",
        1,
        "dynamax/linear_gaussian_ssm dynamax/nonlinear_gaussian_ssm dynamax/slds",
    ),
    "dynamax-hmm": ("probml/dynamax", 1, "dynamax/hidden_markov_model/inference_test.py"),
    "dynamax-models": ("probml/dynamax", 6, "dynamax/hidden_markov_model/models/test_models.py"),
    "numpyro": ("pyro-ppl/numpyro", 1, "installed test/contrib/test_control_flow.py"),
    "tinygp": (
        "dfm/tinygp",
        4,
        "installed tests/test_solvers tests/test_kernels/test_quasisep.py "
        "--ignore tests/test_solvers/test_quasisep/test_ops.py",
    ),
    "cuthbert": (
        "state-space-models/cuthbert",
        6,
        "tests/cuthbertlib/kalman tests/cuthbert/gaussian tests/cuthbert/discrete tests/cuthbert/smc",
    ),
    "probdiffeq": ("pnkraemer/probdiffeq", 25, "tests"),
    "jaxley": (
        "jaxleyverse/jaxley",
        3,
        "tests/jaxley_identical/test_basic_modules.py tests/test_grad.py tests/test_clamp.py -m 'not slow'",
    ),
    "keras": ("keras-team/keras", 2, "keras/src/layers/rnn"),
    "flax": (
        "google/flax",
        2,
        "installed tests/nnx/nn/recurrent_test.py tests/linen/linen_recurrent_test.py",
    ),
    "haiku": (
        "google-deepmind/dm-haiku",
        3,
        "haiku/_src/recurrent_test.py haiku/_src/layer_stack_test.py",
    ),
    "optax": ("google-deepmind/optax", 1, "optax/losses/_classification_test.py -k 'ctc or CTC'"),
    "spyx": (
        "kmheckel/spyx",
        4,
        "installed tests -m 'not network' --ignore tests/test_compress.py --ignore tests/test_sigma_delta.py",
    ),
    "gymnax": (
        "RobertTLange/gymnax",
        12,
        "tests -k 'not bsuite' --ignore tests/wrappers/test_brax.py",
    ),
    "distrax": (
        "google-deepmind/distrax",
        5,
        "distrax/_src/utils/hmm_test.py -k 'with_jit or without_device'",
    ),
    "rlax": ("google-deepmind/rlax", 2, "rlax/_src/vtrace_test.py rlax/_src/multistep_test.py"),
    "recurrentgemma": ("google-deepmind/recurrentgemma", 4, "recurrentgemma/jax"),
    "memax": (
        "smorad/memax",
        2,
        "tests --ignore tests/test_continuous_localization.py --ignore tests/test_readme.py",
    ),
    "brainstate": (
        "chaobrain/brainstate",
        2,
        "brainstate/transform/_loop_no_collection_test.py brainstate/transform/_loop_collect_return_test.py",
    ),
    "equinox": ("patrick-kidger/equinox", 4, "tests/test_scan.py tests/test_while_loop.py"),
    "diffrax": (
        "patrick-kidger/diffrax",
        4,
        "test/test_saveat_solution.py test/test_interpolation.py",
    ),
    "jnkepler": ("kemasuda/jnkepler", 1, "installed tests"),
}
GOOD, MODES = ("passed", "skipped", "xfailed"), ("plain", "marked")


class Pairs:
    """A pytest plugin that runs each test plain and marked.

    Args:
        every: keep every k-th test, from the one after `offset`.
        limit: seconds of processor time after which no further test is started.
        rewrite: rewrite all loops that can be.
        out: the file of the record.
    """

    def __init__(self, every: int, offset: int, limit: float, rewrite: bool, out: str):
        self.every, self.offset, self.limit, self.rewrite, self.out = (
            every,
            offset,
            limit,
            rewrite,
            out,
        )
        self.cases: dict[str, dict[str, Any]] = {}
        self.cost: dict[str, collections.Counter] = {
            mode: collections.Counter() for mode in ("", *MODES)
        }
        self.mode = ""  # outside of tests, as in a module that is imported
        self.errors: list[str] = []
        self.loops: collections.Counter = (
            collections.Counter()
        )  # by place, title, executor and reasons

    def pytest_configure(self) -> None:
        import jax._src.compiler as compiler
        from jax._src.interpreters import mlir

        from jrnn.loops.ir import observers

        observers.subscribers.append(
            lambda what: isinstance(what, str) or self._count(what, observers.current_place()[0])
        )
        if self.rewrite:
            always_rewrite()
        self._time(mlir, "lower_jaxpr_to_module", "lower")
        self._time(compiler, "compile_or_get_cached", "compile")

    def _count(self, plan: Any, where: str) -> None:
        self.loops[where, plan.title, plan.strategy, "; ".join(plan.notes)] += 1

    def _time(self, module: Any, name: str, key: str) -> None:
        """Adds the processor time of calls of a private function of JAX."""
        inner = getattr(module, name)

        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.thread_time() if key == "lower" else time.process_time()
            try:
                return inner(*args, **keywords)
            finally:
                now = time.thread_time() if key == "lower" else time.process_time()
                self.cost[self.mode][key] += now - start

        setattr(module, name, timed)

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = items[self.offset % self.every :: self.every]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {str(report.longrepr)[-600:]}")

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        import jax
        from _pytest.runner import runtestprotocol

        import jrnn

        case: dict[str, Any] = {}
        for mode in MODES if len(self.cases) % 2 else MODES[::-1]:
            jax.clear_caches()  # else what the module or the other run has compiled and traced is there for one of the two
            self.mode, start = mode, time.process_time()
            if hasattr(item, "_request"):
                item._initrequest()
            if mode == "marked":
                with jrnn.optimize_scans(everywhere=True):
                    reports = runtestprotocol(item, nextitem=nextitem, log=False)
            else:
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
            self.mode = ""
            self.cost[mode]["tests"] += time.process_time() - start
            bad = [r for r in reports if r.outcome != "passed"]
            case[mode] = (
                "xfailed"
                if bad and hasattr(bad[0], "wasxfail") and bad[0].skipped
                else bad[0].outcome
                if bad
                else "passed"
            )
            case[f"{mode} seconds"] = time.process_time() - start
            case[f"{mode} text"] = "".join(
                str(r.longrepr)[-3000:] for r in bad if r.outcome == "failed"
            )
            for report in reports if mode == "marked" else ():
                item.ihook.pytest_runtest_logreport(report=report)
        self.cases[item.nodeid] = case
        self.save()
        if sum(cost["tests"] for cost in self.cost.values()) > self.limit:
            item.session.shouldstop = "the limit of processor time"
        return True

    def save(self) -> None:
        loops = [[*loop, count] for loop, count in self.loops.items()]
        record = {"cases": self.cases, "cost": self.cost, "loops": loops, "errors": self.errors}
        Path(self.out).write_text(json.dumps(record, indent=1), encoding="utf-8")

    def pytest_unconfigure(self) -> None:
        self.save()


def always_rewrite() -> None:
    """Makes the choice take arithmetic wherever it is a candidate, also in loops that are too short to gain."""
    from jrnn.loops import compile as compiling

    cheapest = compiling.cheapest

    def chosen(candidates: Any, bounds: Any) -> Any:
        rewritten = [c for c in candidates if c.strategy == "arithmetic"]
        return (rewritten[0], ()) if rewritten else cheapest(candidates, bounds)

    compiling.BRIEF_SECONDS = 0.0
    compiling.cheapest = chosen


def child(every: int, offset: int, limit: float, rewrite: bool, out: str, args: list[str]) -> int:
    import pytest

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore",
        "--color=no",
        "--tb=short",
    ]
    return int(pytest.main([*options, *args], plugins=[Pairs(every, offset, limit, rewrite, out)]))


def ran(
    name: str, options: argparse.Namespace, out: Path, only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Runs a suite, or some tests of it, in a process of its own. Returns its record."""
    import shlex

    repository, every, text = SUITES[name]
    folder = (Path(options.libraries) / repository.split("/")[1]).resolve()
    args, installed = shlex.split(text), text.startswith("installed ")
    path = [*([] if installed else [str(folder)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    keep = {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    given = [name for name in args if name != "installed"]
    head = [1, 0, 1e9] if only else [options.every or every, options.offset, options.seconds]
    given = ["--import-mode=append"] * installed + (list(only) or given)
    call = json.dumps([*head, options.rewrite, str(out), given])
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", call]
    with open(out.with_suffix(".log"), "w", encoding="utf-8") as log:
        env = os.environ | keep | {"PYTHONPATH": os.pathsep.join(path)}
        try:
            subprocess.run(
                command, cwd=folder, env=env, stdout=log, stderr=log, timeout=options.timeout
            )
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            log.write(str(error))
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


def newly_failing(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        k
        for k, case in record["cases"].items()
        if case["plain"] in GOOD and case["marked"] not in GOOD
    )


def line(name: str, record: dict[str, Any], again: tuple[str, ...]) -> str:
    cases, cost = record["cases"].values(), record["cost"]
    passed = [sum(case[mode] == "passed" for case in cases) for mode in MODES]
    ratios = ", ".join(
        f"{key} {cost['marked'].get(key, 0):.1f} / {cost['plain'].get(key, 0):.1f} s = "
        f"{cost['marked'].get(key, 0) / max(cost['plain'].get(key, 0), 1e-9):.2f}"
        for key in ("tests", "lower", "compile")
    )
    loops = sum(count for *_, count in record["loops"])
    rewritten = sum(count for _, _, executor, _, count in record["loops"] if executor != "lax.scan")
    return (
        f"{name}: of {len(cases)} tests {passed[0]} pass plain, {passed[1]} marked; newly failing {list(again)}; "
        f"{ratios}; {rewritten} of {loops} loops rewritten"
    )


def main(options: argparse.Namespace) -> int:
    total: dict[str, Any] = {
        "cases": {},
        "cost": {mode: collections.Counter() for mode in MODES},
        "loops": [],
    }
    failing: list[str] = []
    out = Path(options.json or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    for name in options.names or SUITES:
        file = (out / f"{name}.json").resolve()
        file.unlink(missing_ok=True)
        record = ran(name, options, file)
        if not record.get("cases"):
            print(
                f"{name}: no test ran: {file.with_suffix('.log').read_text(encoding='utf-8')[-300:]!r}",
                flush=True,
            )
            continue
        again = newly_failing(record)
        if again:
            once_more = ran(name, options, file.with_suffix(".again.json"), again)
            again = newly_failing(once_more) if once_more else again
        failing += [f"{name} {test}" for test in again]
        print(line(name, record, again), flush=True)
        total["cases"] |= {f"{name} {k}": v for k, v in record["cases"].items()}
        total["loops"] += record["loops"]
        for mode in MODES:
            total["cost"][mode].update(record["cost"][mode])
    if total["cases"]:
        print(line("all", total, tuple(failing)))
    return bool(failing) or not total["cases"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(*json.loads(sys.argv[2])))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "libraries", nargs="?", help="the folder of checkouts, each named as its repository"
    )
    parser.add_argument("names", nargs="*", help="suites; all if none is named")
    parser.add_argument(
        "--list", action="store_true", help="print the suites with their repositories, and end"
    )
    parser.add_argument("--every", type=int, help="take every k-th test of each suite")
    parser.add_argument("--offset", type=int, default=0, help="the first test that is taken")
    parser.add_argument(
        "--seconds", type=float, default=60, help="processor time of a suite's tests (60)"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of a suite (1800)")
    parser.add_argument(
        "--rewrite", action="store_true", help="rewrite all loops that can be, whatever that costs"
    )
    parser.add_argument("--json", help="the folder of records")
    options = parser.parse_args()
    if options.list or not options.libraries:
        print(
            "\n".join(
                f"{name:16} {repository}: {args}" for name, (repository, _, args) in SUITES.items()
            )
        )
        sys.exit(not options.list)
    sys.exit(main(options))
