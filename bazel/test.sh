#!/usr/bin/env bash
# All tests: Bazel's targets with .venv, then the other end of the supported jax range.
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

ensure_bazel
"$BAZEL" build --show_progress_rate_limit=30 //...
run_tests //...
bazel/test_other_end.sh
