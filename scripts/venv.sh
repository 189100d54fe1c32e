# Sourced by train.sh and test.sh: makes .venv at the root of the repository and installs jrnn into it, once.
# Needs a Python of 3.11 to 3.13 with venv, and nothing else. Set PYTHON to choose which.

fits() { "$1" -c 'import sys; sys.exit(not sys.version_info >= (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "jrnn needs Python 3.11 or newer; python3 is $(python3 --version 2>&1 || echo missing)." >&2
    echo "Install one (Debian and Ubuntu: apt install python3.11 python3.11-venv), or name it: PYTHON=/path/to/python $0" >&2
    return 2
}

# make_venv EXTRA: .venv with jrnn, editable, and its EXTRA dependencies ("" for none).
make_venv() {
    local stamp=".venv/installed${1:+-$1}" python
    if [ -x .venv/bin/python ] && ! fits .venv/bin/python; then
        rm -rf .venv # of a Python that is gone or too old
    fi
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || exit 2
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            echo "$python cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)." >&2
            exit 2
        fi
    fi
    if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${1:+[$1]}"
        touch "$stamp"
    fi
}
