#!/usr/bin/env bash
# Installs one stack (cpu or gpu) from its lock, then this project's wheel, into .venv.
#   usage: requirements/setup.sh [cpu|gpu]
# Uses uv if a working one is there, else fetches it from PyPI; prefers a Python 3.12 that is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
stack=${1:-cpu}
[[ -f requirements/$stack.txt ]] || { echo "setup: no lock requirements/$stack.txt; the stacks are cpu and gpu" >&2; exit 2; }

uv=()
for candidate in uv "python3 -m uv" .uv/bin/uv; do
    read -ra command <<<"$candidate"
    if "${command[@]}" --version >/dev/null 2>&1; then uv=("${command[@]}"); break; fi
done
if [[ ${#uv[@]} -eq 0 ]]; then
    echo "setup: fetching uv"
    version=0.13.9
    { python3 -m venv .uv && .uv/bin/python -m pip install -q --disable-pip-version-check "uv==$version"; } ||
        python3 -m pip install -q --disable-pip-version-check --target .uv "uv==$version" ||
        { echo "setup: uv could not be fetched; install it (https://docs.astral.sh/uv) and run this again" >&2; exit 1; }
    uv=(.uv/bin/uv)
fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    python=3.12 # uv finds it or downloads it
    for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12; do
        if "$candidate" -c '' 2>/dev/null; then python=$candidate; break; fi
    done
    "${uv[@]}" venv -q --clear --python "$python" .venv
fi

echo "setup: installing requirements/$stack.txt into .venv"
"${uv[@]}" pip sync -q --python .venv/bin/python --require-hashes --compile-bytecode "requirements/$stack.txt"
rm -rf build dist # setuptools would pack files that a former build left there
"${uv[@]}" build -q --wheel --no-build-isolation --python .venv/bin/python --out-dir dist .
rm -rf build ./*.egg-info
"${uv[@]}" pip install -q --python .venv/bin/python --no-deps --reinstall --compile-bytecode dist/*.whl
