#!/usr/bin/env bash
# Writes requirements/: for either end of the supported jax range, the exact versions of everything
# that development and the tests use. Usage: lock.sh OLDEST_JAX NEWEST_JAX
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

lock() {
  local end=$1 jax=$2 python=$3 venv
  venv=$(mktemp -d)
  "$python" -m venv "$venv"
  # What pyproject.toml asks for with all extras, and hatchling's dependencies.
  "$python" -c '
import tomllib
pyproject = tomllib.load(open("pyproject.toml", "rb"))
project = pyproject["project"]
needs = [*project["dependencies"], *pyproject["build-system"]["requires"][:1]]
for extra in project["optional-dependencies"].values():
    needs += [need for need in extra if not need.startswith("jax_ep[")]
print(*needs, sep="\n")' >"$venv/needs.txt"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    "jax==$jax" "jaxlib==$jax" -r "$venv/needs.txt"
  {
    echo "# Written by bazel/lock.sh: jax $jax, $("$python" --version)."
    "$venv/bin/python" -m pip freeze
  } >"requirements/$end.txt"
  rm -rf "$venv"
}

lock oldest "$1" "$(find_python 11 11)"
lock newest "$2" "$(find_python 12 12)"
