#!/usr/bin/env bash
# All tests: Bazel's targets with .venv, then the other end of the supported jax range.
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

ensure_bazel
status=0
"$BAZEL" test --show_progress_rate_limit=30 //... || status=$?
targets=$("$BAZEL" query 'tests(//...)' 2>/dev/null)
# shellcheck disable=SC2086
.venv/bin/python bazel/test_summary.py "$("$BAZEL" info bazel-testlogs 2>/dev/null)" $targets
((status == 0)) || exit "$status"

bazel/test_other_end.sh
