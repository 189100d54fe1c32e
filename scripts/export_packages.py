"""Exports every model of tests/convert/zoo.py and every case of tests/convert/rule_cases.py for verify_with_caffe2.py.

python scripts/export_packages.py FOLDER [NAME ...]
"""

from __future__ import annotations

import sys
import traceback
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jrnn
from jrnn.errors import JrnnError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "convert"))

from rule_cases import CASES
from zoo import MODELS, Model


def export(model: Model, folder: Path) -> None:
    fn, args, params = model
    package = jrnn.from_jax(fn, *args, params=params)
    package.save(folder)
    inputs = dict(zip(package.input_names, jax.tree.leaves(args), strict=True))
    outputs = package.to_jax()(inputs)
    arrays = {f"in:{n}": np.asarray(v) for n, v in inputs.items()} | {
        f"out:{n}": np.asarray(v) for n, v in outputs.items()
    }
    np.savez(folder / "case.npz", **arrays)


def main(argv: list[str]) -> int:
    if not argv:
        sys.exit(__doc__)
    failed = 0
    models = MODELS | {f"rule {name}": partial(Model, *case) for name, case in CASES.items()}
    for name in argv[1:] or models:
        try:
            export(models[name](), Path(argv[0], name))
        except JrnnError as e:
            failed += 1
            traceback.print_exc(limit=-2)
            print(f"{name}: {e}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
