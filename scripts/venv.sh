# Sourced by train.sh, test.sh, docs.sh and matrix.sh: finds Pythons, makes an environment in the repository and installs jrnn there.
# Needs a supported Python with venv, and nothing else: no compiler, and no permission to write but here and in ~/.cache.

SUPPORTED="3.14 3.13 3.12 3.11" # the newest first

# temporary_folder: programs put their files into the clone where the system's folder for them cannot be written.
temporary_folder() {
    local probe
    if probe=$(mktemp 2>/dev/null); then
        rm -f "$probe"
    else
        mkdir -p .cache/tmp
        export TMPDIR="$PWD/.cache/tmp"
    fi
}

# python_version PYTHON [MODULE...]: its version, as 3.12, where it is supported and has the modules; else status 1.
python_version() {
    local python=$1 version supported
    shift
    version=$("$python" -c '
import importlib, sys
for name in ("ctypes", "ssl", *sys.argv[1:]):
    importlib.import_module(name)
print("%d.%d" % sys.version_info[:2])' "$@" 2>/dev/null) || return 1
    for supported in $SUPPORTED; do
        if [ "$version" = "$supported" ]; then
            echo "$version"
            return
        fi
    done
    return 1
}

# python_of VERSION: the path of a Python of this version that can make virtual environments; status 1 where there is none.
python_of() {
    local python
    for python in "python$1" python3 python {/usr/local/bin,/opt/homebrew/bin,/usr/bin}/"python$1" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1" \
        "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-"$1".*/bin/"python$1"; do
        if [ "$(python_version "$python" venv ensurepip)" = "$1" ]; then
            command -v "$python"
            return
        fi
    done
    return 1
}

# find_python: the Python to use: the one that PYTHON names, else the newest supported one.
find_python() {
    local version missing=""
    if [ -n "${PYTHON:-}" ]; then
        if python_version "$PYTHON" venv ensurepip >/dev/null; then
            echo "$PYTHON"
            return
        fi
        echo "PYTHON=$PYTHON is not a Python of ${SUPPORTED// / or } with venv; it says: $("$PYTHON" --version 2>&1 | head -n 1)" >&2
        return 2
    fi
    for version in $SUPPORTED; do
        if python_of "$version"; then
            return
        fi
    done
    if python_version python3 >/dev/null; then
        missing=", without venv"
    fi
    echo "jrnn needs Python ${SUPPORTED// / or } with venv, and found none; python3 is $(python3 --version 2>&1 | head -n 1)$missing." >&2
    echo "Install one (Debian and Ubuntu: apt install python3 python3-venv; others: python.org), or name it: PYTHON=/path/to/python $0" >&2
    return 2
}

# make_venv EXTRA [FOLDER]: .venv, or FOLDER, with jrnn, editable, and its EXTRA dependencies ("" for none; several by commas).
make_venv() {
    local folder=${2:-.venv}
    local stamp="$folder/installed${1:+-$1}" python version wanted=""
    temporary_folder
    if [ -n "${PYTHON:-}" ]; then
        python=$(find_python) || exit 2
        wanted=$(python_version "$python")
    fi
    version=$(python_version "$folder/bin/python" pip || true)
    if [ -z "$version" ] || [ "${wanted:-$version}" != "$version" ]; then
        rm -rf "$folder" # not finished, of a Python that is gone or not supported, or of another one than PYTHON names
        python=${python:-$(find_python)} || exit 2
        if ! "$python" -m venv "$folder"; then
            rm -rf "$folder"
            echo "$python cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)." >&2
            exit 2
        fi
    fi
    echo "jrnn: $("$folder/bin/python" --version), in $PWD/$folder"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$PWD" ] || [ pyproject.toml -nt "$stamp" ]; then
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --editable ".${1:+[$1]}"
        echo "$PWD" >"$stamp"
    fi
}
