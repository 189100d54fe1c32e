"""Runs exported packages under the real Caffe2 and compares: FOLDER holds packages, made by scripts/export_packages.py.

Needs Python 3.8 with `torch==1.8.1 "numpy<1.24" future protobuf==3.20.3 six networkx`, and nothing of jrnn:

    python3.8 scripts/verify_with_caffe2.py FOLDER [NAME ...]

Each package is a folder with init_net.pb, predict_net.pb and case.npz, whose arrays are called `in:BLOB` and `out:BLOB`.
Exit status 1 where one differs by more than 1e-4 of the greater of 1 and the largest number, or does not run.
"""

import sys
import traceback
from pathlib import Path

import numpy as np
from caffe2.proto import caffe2_pb2
from caffe2.python import workspace

TOLERANCE = 1e-4


def load(path):
    net = caffe2_pb2.NetDef()
    net.ParseFromString(path.read_bytes())
    return net


def difference(actual, wanted):
    if actual.shape != wanted.shape:
        return float("inf")
    if actual.dtype == bool or wanted.dtype == bool:
        return float((actual != wanted).any())
    if not wanted.size:
        return 0.0
    finite = wanted[np.isfinite(wanted)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    same = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        return (
            float(np.nan_to_num(np.where(same, 0, np.abs(actual - wanted)), nan=np.inf).max())
            / scale
        )


def run(folder):
    """Returns the greatest difference of one package's outputs."""
    workspace.ResetWorkspace()
    case = dict(np.load(str(folder / "case.npz")))
    assert workspace.RunNetOnce(load(folder / "init_net.pb")), "the init net failed"
    for name, value in case.items():
        if name.startswith("in:"):
            workspace.FeedBlob(name[3:], value)
    assert workspace.RunNetOnce(load(folder / "predict_net.pb")), "the predict net failed"
    wanted = {name[4:]: value for name, value in case.items() if name.startswith("out:")}
    return max(
        difference(np.asarray(workspace.FetchBlob(name)), value) for name, value in wanted.items()
    )


def main(argv):
    if not argv:
        sys.exit(__doc__)
    names = set(argv[1:])
    folders = sorted(
        p.parent
        for p in Path(argv[0]).glob("*/predict_net.pb")
        if not names or p.parent.name in names
    )
    bad = 0
    for folder in folders:
        try:
            worst = run(folder)
            verdict = "agrees" if worst <= TOLERANCE else "DIFFERS"
            print("{:32} {} (largest difference {:.1e})".format(folder.name, verdict, worst))
            bad += worst > TOLERANCE
        except Exception:
            bad += 1
            print(
                "{:32} FAILED: {}".format(
                    folder.name, traceback.format_exc().strip().splitlines()[-1][:600]
                )
            )
    print("{} of {} packages agree with Caffe2".format(len(folders) - bad, len(folders)))
    return 1 if bad or not folders else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
