#!/usr/bin/env bash
# What to run on a machine with a CUDA GPU, in at most 9 minutes and without a network: everything goes to one folder.
#
#     scripts/accelerator_day.sh [FOLDER] [STEP...]        (PYTHON names the Python; it has jrnn's dependencies and JAX for CUDA)
#
# On a machine without a GPU the same steps run on the CPU, in sizes that only show that they run.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" scripts/accelerator_day.py "$@"
