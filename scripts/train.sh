#!/usr/bin/env bash
# Makes .venv, installs jrnn, and trains: scripts/train.sh [CONFIG [arguments of `jrnn train`]]
#   scripts/train.sh                                              the default config, about a minute on 2 cores
#   scripts/train.sh char_lstm --set train.steps=100
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
make_venv ""

case "${1:-}" in
"" | -*) set -- char_lstm "$@" ;; # no config among the arguments
esac
exec .venv/bin/python -m jrnn train "$@"
