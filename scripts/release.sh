#!/usr/bin/env bash
# Builds and checks a release:
#   scripts/release.sh --check     builds dist/ without a network, checks its metadata, version and license, installs the wheel on every
#                                  supported Python that this machine has, and runs the tiny test, the command and one training there;
#                                  runs the notebooks
#   scripts/release.sh VERSION     the same after it has set the version and the date in the changelog; then commits and tags
# Pushing the tag publishes: .github/workflows/publish.yml.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

stop() {
    echo "$1" >&2
    exit 2
}

version=${1:-}
[ -n "$version" ] || stop "which version? scripts/release.sh VERSION, or scripts/release.sh --check"
if [ "$version" != --check ]; then
    [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+(rc[0-9]+)?$ ]] || stop "$version is no version such as 1.2.3 or 1.2.3rc1"
    [ -z "$(git status --porcelain)" ] || stop "there are changes that are not committed"
    grep -q '^\[project.urls\]' pyproject.toml || stop "pyproject.toml names no repository: add [project.urls] with Repository = \"...\""
    grep -q "^## $version (not released)" CHANGELOG.md || stop "CHANGELOG.md has no heading '## $version (not released)'"
    sed -i "s/^## $version (not released)/## $version ($(date +%F))/" CHANGELOG.md
    sed -i "s/^__version__ = .*/__version__ = \"$version\"/" jrnn/version.py
    sed -i "s/^version: .*/version: $version/" CITATION.cff
fi

make_venv test .venv-release
.venv-release/bin/python -m pip install --quiet --disable-pip-version-check "twine>=6"
rm -rf dist build/lib

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# An environment with the build requirements. The build itself has no network, where the system allows that.
.venv-release/bin/python -m venv "$folder/build"
builder="$folder/build/bin/python"
"$builder" -m pip install --quiet --disable-pip-version-check "build>=1.2" "setuptools>=77"
headers=$(cd scripts/packaging && "$builder" -c 'import backend; print(*backend.HEADERS)')
"$builder" -m pip install --quiet --disable-pip-version-check $headers
apart=()
unshare --user --net true 2>/dev/null && apart=(unshare --user --net)
PIP_NO_INDEX=1 "${apart[@]}" "$builder" -m build --no-isolation --outdir dist . >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
.venv-release/bin/python -m twine check --strict dist/*
.venv-release/bin/python scripts/packaging/check_dist.py dist
tar -xzf dist/*.tar.gz -C "$folder"
.venv-release/bin/python scripts/notebooks.py "$folder/notebooks" --run
small=()
for change in train.steps=1 train.steps_per_call=1 model.hidden=2 data.batch=2 data.chunk=4 sample.length=2; do
    small+=(--set "$change")
done
for supported in $SUPPORTED; do
    python=$(python_of "$supported") || { echo "Python $supported: none on this machine"; continue; }
    env="$folder/$supported"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check dist/*.whl pytest
    (
        cd "$folder"
        cp jrnn-*/tests/test_tiny.py "$env/"
        "$env/bin/python" -m pytest -q "$env/test_tiny.py"
        "$env/bin/jrnn" ops lstm >"$env/ops"
        grep -q LSTMUnit "$env/ops"
        "$env/bin/jrnn" train char_lstm --out "$env/run" "${small[@]}" | tail -n 1
    )
    echo "Python $supported: the wheel installs, passes the tiny test and trains"
done

if [ "$version" != --check ]; then
    git commit --quiet --all --message "Release $version"
    git tag "v$version"
    echo "push it: git push origin main v$version"
fi
