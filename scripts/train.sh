#!/usr/bin/env bash
# Makes .venv, installs jrnn with what its commands need, and trains: scripts/train.sh [CONFIG [arguments of `jrnn train`]]
#   scripts/train.sh                                              the default config; it says how long it takes here
#   scripts/train.sh char_lstm --set train.steps=100
# Something is printed at least every 10 seconds.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

# still WHAT: says every 8 seconds that it goes on. Ends with its TERM signal at once, and leaves no `sleep` on the pipe.
still() {
    local seconds=0 nap=""
    trap 'kill "$nap" 2>/dev/null; exit 0' TERM
    while true; do
        sleep 8 &
        nap=$!
        wait "$nap"
        seconds=$((seconds + 8))
        echo "$1: $seconds s so far"
    done
}

echo "installing what is missing into .venv"
still "installing" &
beat=$!
trap 'kill "$beat" 2>/dev/null || true' EXIT
make_venv data,onnx,plot,text # what the commands of the README need
kill "$beat"
wait "$beat" 2>/dev/null || true
trap - EXIT

case "${1:-}" in
"" | -*) set -- char_lstm "$@" ;; # no config among the arguments
esac
# As `python -m jrnn train`, with a word every 8 seconds while Python loads JAX: a slow machine takes that long.
echo "loading JAX"
exec .venv/bin/python -c '
import sys
import threading

loaded = threading.Event()

def still():
    seconds = 8
    while not loaded.wait(8):
        print(f"loading JAX: {seconds} s so far", flush=True)
        seconds += 8

threading.Thread(target=still, daemon=True).start()
from jrnn.cli import main

loaded.set()
sys.argv[0] = "jrnn"
sys.exit(main())' train "$@"
