#!/usr/bin/env bash
# Removes all that the other commands wrote: into the checkout, and Bazel's output outside of it.
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

if bazel=$(find_bazel); then
  "$bazel" clean --expunge
fi
rm -rf .venv .venv-oldest .venv-newest .bazelrc.local bazel-out build dist jax_ep/_native/*.so \
  .hypothesis .pytest_cache
find . -name __pycache__ -type d -prune -exec rm -rf {} +
