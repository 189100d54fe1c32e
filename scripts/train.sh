#!/usr/bin/env bash
# Makes .venv, installs jrnn, and trains: scripts/train.sh [CONFIG [arguments of `jrnn train`]]
#   scripts/train.sh                                              the default config, about a minute on 2 cores
#   scripts/train.sh configs/char_lstm.toml --set train.steps=100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
make_venv ""

case "${1:-}" in
"" | -*) set -- configs/char_lstm.toml "$@" ;; # no config among the arguments
esac
exec .venv/bin/jrnn train "$@"
