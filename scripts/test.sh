#!/usr/bin/env bash
# Makes .venv, installs jrnn with what tests need, and runs the linter and the tests: scripts/test.sh [arguments of pytest]
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
make_venv test

.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
.venv/bin/python -m mypy --no-error-summary
.venv/bin/lint-imports --no-logo --cache-dir .cache/imports
exec .venv/bin/python -m pytest -n 2 "$@"
