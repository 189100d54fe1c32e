#!/usr/bin/env bash
# Runs the kernel for CPUs on several threads with ThreadSanitizer, and its tests with AddressSanitizer and
# UndefinedBehaviorSanitizer, in the environment of scripts/test.sh.
# Needs GCC on Linux. Arguments go to pytest.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT

headers=$("$PYTHON" -c 'import jax.ffi; print(jax.ffi.include_dir())')
flags=(-std=c++17 -O1 -g -fPIC -fno-math-errno -ffp-contract=fast -Wno-psabi
    -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
source=jrnn/loops/kernels/native/src
g++ "${flags[@]}" -DJRNN_KERNEL=base -DJRNN_VECTOR_BYTES=16 -c $source/kernel.cpp -o "$objects/kernel.o"
g++ "${flags[@]}" -isystem "$headers" -c $source/entry.cpp -o "$objects/entry.o"
g++ -shared "${flags[@]}" "$objects"/*.o -o "$objects/libjrnn_loops.so"

PYTHONPATH=. "$PYTHON" tests/loops/native_program.py "$objects/program"
g++ -std=c++17 -O1 -g -fsanitize=thread -Wno-psabi -I$source -DJRNN_KERNEL=base tests/loops/native_threads.cpp $source/kernel.cpp \
    -o "$objects/threads" -pthread
"$objects/threads" "$objects/program"

JRNN_KERNEL="$objects/libjrnn_loops.so" ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
    "$PYTHON" -m pytest -q tests/loops/test_native.py tests/loops/test_unrolled.py tests/loops/test_lanes.py "$@"
