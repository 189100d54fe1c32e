#!/usr/bin/env bash
# Makes .venv-docs and builds the documentation into build/docs/html, where index.html opens without a server or a network.
#   scripts/docs.sh            warnings are errors
#   scripts/docs.sh doctest    runs the examples of the API reference instead; the tests run those of all pages
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
make_venv docs .venv-docs

builder=${1:-html}
.venv-docs/bin/python -m sphinx -b "$builder" --fail-on-warning --keep-going -d build/docs/doctrees docs "build/docs/$builder"
if [ "$builder" = html ]; then
    echo "open $PWD/build/docs/html/index.html"
fi
