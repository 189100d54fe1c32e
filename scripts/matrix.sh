#!/usr/bin/env bash
# Runs the tests in a fresh environment for every supported Python that this machine has and every supported JAX, and prints a
# table: scripts/matrix.sh [--python VERSION] [--jax VERSION] [arguments of pytest]
#   scripts/matrix.sh                               everything: about ten minutes for each row, on 2 cores
#   scripts/matrix.sh -k executor                   a subset
#   scripts/matrix.sh --python 3.12 --jax newest    one row: the newest JAX that pyproject.toml allows
#   scripts/matrix.sh --python 3.13 --jax next      one row: the newest JAX that there is
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
temporary_folder

versions=$SUPPORTED
releases="0.10 0.11 newest" # of JAX
while true; do
    case "${1:-}" in
    --python) versions=$2 ;;
    --jax) releases=$2 ;;
    *) break ;;
    esac
    shift 2
done

# row PYTHON JAX PASSED FAILED TIME
table=""
row() {
    local line
    line=$(printf '%-8s %-10s %7s %7s %8s' "$1" "$2" "$3" "$4" "$5")
    table+="$line"$'\n'
}

# install ENVIRONMENT PYTHON JAX: a fresh environment; its output goes to a log beside it.
install() {
    local pinned=()
    if [ "$3" != newest ] && [ "$3" != next ]; then
        pinned=("jax==$3.*" "jaxlib==$3.*")
    fi
    rm -rf "$1" "$1.xml"
    mkdir -p .matrix
    "$2" -m venv "$1" >"$1.log" 2>&1 &&
        "$1/bin/python" -m pip install --disable-pip-version-check --only-binary :all: \
            --editable ".[test]" ${pinned[@]+"${pinned[@]}"} >>"$1.log" 2>&1 || return 1
    if [ "$3" = next ]; then
        "$1/bin/python" -m pip install --disable-pip-version-check --only-binary :all: --upgrade jax jaxlib >>"$1.log" 2>&1
    fi
}

# count PYTHON FILE: how many tests passed and failed, of pytest's JUnit file; errors count as failures.
count() {
    "$1" -c '
import sys, xml.etree.ElementTree as ET
suites = ET.parse(sys.argv[1]).getroot().findall("testsuite")
total, skipped, failed = (sum(int(s.get(name)) for s in suites for name in names)
                          for names in (["tests"], ["skipped"], ["failures", "errors"]))
print(total - skipped - failed, failed)' "$2" 2>/dev/null || echo "- -"
}

status=0
row python jax passed failed time
for version in $versions; do
    if ! python=$(python_of "$version"); then
        row "$version" - - - "no such Python on this machine"
        continue
    fi
    seen=""
    for release in $releases; do
        environment=".matrix/$version-$release"
        if ! install "$environment" "$python" "$release"; then
            if grep -q "No matching distribution found for jax" "$environment.log"; then
                row "$version" "$release" - - "not made for this Python"
            else
                row "$version" "$release" - - "not installed: see $environment.log"
                status=1
            fi
            continue
        fi
        jax=$("$environment/bin/python" -c 'from importlib.metadata import version; print(version("jax"))')
        case " $seen " in
        *" $jax "*)
            row "$version" "$release" - - "is $jax"
            continue
            ;;
        esac
        seen+=" $jax"
        echo "Python $version, jax $jax"
        start=$SECONDS
        "$environment/bin/python" -m pytest -n 2 --junitxml="$environment.xml" "$@" || status=1
        took=$((SECONDS - start))
        read -r passed failed <<<"$(count "$environment/bin/python" "$environment.xml")"
        row "$version" "$jax" "$passed" "$failed" "$((took / 60))m$((took % 60))s"
    done
done
printf '\n%s' "$table"
exit "$status"
