#!/usr/bin/env bash
# Runs the tests in a fresh environment for every supported Python that this machine has and every supported JAX, and prints a
# table: scripts/matrix.sh [--quick] [--python VERSION] [--jax VERSION] [arguments of pytest]
#   scripts/matrix.sh                               everything: about ten minutes for each row, on 2 cores
#   scripts/matrix.sh -k executor                   a subset
#   scripts/matrix.sh --python 3.12 --jax newest    one row: the newest JAX that pyproject.toml allows
#   scripts/matrix.sh --python 3.13 --jax next      one row: the newest JAX that there is
#   scripts/matrix.sh --quick                       what depends most on JAX, on the newest release of each supported minor, but for
#                                                   the one in .venv, which scripts/test.sh tests whole: .ci/run does both
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
temporary_folder

versions=$SUPPORTED
releases="0.10 0.11 newest" # of JAX
quick=""
while true; do
    case "${1:-}" in
    --quick)
        quick=yes
        releases="0.10 0.11 0.12"
        shift
        continue
        ;;
    --python) versions=$2 ;;
    --jax) releases=$2 ;;
    *) break ;;
    esac
    shift 2
done
if [ -n "$quick" ] && [ $# = 0 ]; then
    set -- tests/as_users tests/test_tiny.py tests/loops/test_long_loops.py tests/test_primitive_rules.py tests/loops/test_jax_names.py tests/loops/test_matrix_states.py
fi

# row PYTHON JAX PASSED FAILED TIME
table=""
row() {
    local line
    line=$(printf '%-8s %-10s %7s %7s %8s' "$1" "$2" "$3" "$4" "$5")
    table+="$line"$'\n'
}

# pip ENVIRONMENT ARGUMENTS...: `pip install`, whose output goes to a log beside the environment.
pip() {
    local environment=$1
    shift
    "$environment/bin/python" -m pip install --disable-pip-version-check --only-binary :all: "$@" >>"$environment.log" 2>&1
}

# install ENVIRONMENT PYTHON JAX: a fresh environment. A quick one is made once, and has what jrnn and the tests above need: jrnn
# itself is imported from the clone, so that its kernel, which all environments share, stays the one that .venv built.
install() {
    local pinned=() needed=()
    if [ "$3" != newest ] && [ "$3" != next ]; then
        pinned=("jax==$3.*" "jaxlib==$3.*")
    fi
    mkdir -p .matrix
    : >"$1.log"
    rm -f "$1.xml"
    if [ -n "$quick" ]; then
        if ! python_version "$1/bin/python" pip >/dev/null; then
            rm -rf "$1"
            "$2" -m venv "$1" >>"$1.log" 2>&1 || return 1
        fi
        while IFS= read -r line; do needed+=("$line"); done < <("$1/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")')
        pip "$1" --no-compile --upgrade "${needed[@]}" ${pinned[@]+"${pinned[@]}"} pytest pytest-xdist hypothesis
        return
    fi
    rm -rf "$1"
    "$2" -m venv "$1" >>"$1.log" 2>&1 && pip "$1" --editable ".[test]" ${pinned[@]+"${pinned[@]}"} || return 1
    if [ "$3" = next ]; then
        pip "$1" --upgrade jax jaxlib
    fi
}

# jax_of PYTHON: the version of the JAX that it has; status 1 where it has none.
jax_of() {
    "$1" -c 'from importlib.metadata import version; print(version("jax"))' 2>/dev/null
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

# tested VERSION PYTHON RELEASE ARGUMENTS...: adds a row; status 1 where this Python has no such JAX.
tested() {
    local version=$1 python=$2 release=$3 environment=".matrix/${quick:+quick-}$1-$3" jax start took passed failed
    shift 3
    if ! install "$environment" "$python" "$release"; then
        if grep -q "No matching distribution found for jax" "$environment.log"; then
            row "$version" "$release" - - "not made for this Python"
            return 1
        fi
        row "$version" "$release" - - "not installed: see $environment.log"
        status=1
        return
    fi
    jax=$(jax_of "$environment/bin/python")
    case " $seen " in
    *" $jax "*)
        row "$version" "$release" - - "is $jax"
        return
        ;;
    esac
    seen+=" $jax"
    echo "Python $version, jax $jax"
    start=$SECONDS
    "$environment/bin/python" -m pytest -n 2 --junitxml="$environment.xml" "$@" || status=1
    took=$((SECONDS - start))
    read -r passed failed <<<"$(count "$environment/bin/python" "$environment.xml")"
    row "$version" "$jax" "$passed" "$failed" "$((took / 60))m$((took % 60))s"
}

status=0
row python jax passed failed time
if [ -n "$quick" ]; then
    own=$(jax_of .venv/bin/python || true)
    for release in $releases; do
        seen=""
        if [ -n "$own" ] && [ "${own#"$release".}" != "$own" ]; then
            row "$(python_version .venv/bin/python || true)" "$own" - - "is tested whole in .venv"
            continue
        fi
        for version in $versions; do # the newest that has this JAX
            if python=$(python_of "$version") && tested "$version" "$python" "$release" "$@"; then
                break
            fi
        done
    done
else
    for version in $versions; do
        if ! python=$(python_of "$version"); then
            row "$version" - - - "no such Python on this machine"
            continue
        fi
        seen=""
        for release in $releases; do
            tested "$version" "$python" "$release" "$@" || true
        done
    done
fi
printf '\n%s' "$table"
exit "$status"
