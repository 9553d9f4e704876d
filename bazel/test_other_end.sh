#!/usr/bin/env bash
# Tests the other end of the supported jax range than .venv's: builds a wheel, installs it into a
# clean venv with that jax, and runs the tests against the installed package.
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

if [[ $(end_of_range .venv) == oldest ]]; then
  end=newest
  if ! python=$(find_python 12 13); then
    say "NOT TESTED: the newest jax needs Python 3.12 or 3.13, and none was found"
    exit
  fi
else
  end=oldest
  python=$(find_python 11 11) || python=$(cut -d' ' -f1 .venv/packages)
fi
venv=.venv-$end
wheels=build/wheels-$end
ensure_bazel
ensure_venv "$venv" "$python" "$end"

wheel_key="$(<"$venv/packages") $(hash_files \
  BUILD WORKSPACE .bazelrc pyproject.toml README.md bazel csrc xla_ffi jax_ep)"
if [[ ! -f $venv/wheel || $(<"$venv/wheel") != "$wheel_key" ]]; then
  rm -rf "$wheels"
  PYTHON=$python bazel/wheel.sh "$wheels"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall \
    "$wheels"/jax_ep-*.whl
  echo "$wheel_key" >"$venv/wheel"
fi
say "testing $("$venv/bin/python" -P -c '
import sys, jax, jax_ep
assert "site-packages" in jax_ep.__file__, jax_ep.__file__
print(f"jax {jax.__version__}, Python {sys.version.split()[0]}, {jax_ep.__file__}")')"

# The key makes Bazel run the tests anew when the installed package has changed.
installed=("--test_env=JAX_EP_INSTALLED=$PWD/$venv/bin/python"
  "--test_env=JAX_EP_INSTALLED_KEY=$(sha256sum <"$venv/wheel" | cut -c1-16)")
run_tests //tests/... "${installed[@]}" --test_arg=-m "--test_arg=not slow"
# The slow tests of the semantics, too: the reference is compiled by this end's XLA.
run_tests "//tests:test_prepare + //tests:test_dispatch + //tests:test_combine" \
  "${installed[@]}" --test_arg=-m --test_arg=slow
