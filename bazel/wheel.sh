#!/usr/bin/env bash
# Writes a wheel for one Python into a folder. Usage: wheel.sh FOLDER; PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

ensure_bazel
python=$(choose_python)
ensure_python_parts "$python"
say "building for $python, in an environment of its own: this takes a few minutes"
"$python" -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir "$1" .
ls "$1"/jax_ep-*.whl
