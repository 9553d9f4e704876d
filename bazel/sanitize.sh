#!/usr/bin/env bash
# Runs the kernels under compute-sanitizer's memcheck and racecheck, on a GPU of this machine, with
# several ranks on it and small arrays: a minute or two. Usage: sanitize.sh [BINARY]
#
#   BINARY                 //csrc/cuda:kernels_test, built elsewhere (default: Bazel builds it)
#   COMPUTE_SANITIZER=...  the tool (default: on the PATH, or in CUDA_HOME, or /usr/local/cuda)
#   TIMEOUT_S=...          how long a kernel waits for another rank, which is slower than usual here
#                          (default: 60)
set -euo pipefail
binary=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
source bazel/lib.sh

# Seconds for each tool. A kernel that waits in vain ends by itself, before that.
limit_s=300

find_sanitizer() {
  command -v "${COMPUTE_SANITIZER:-compute-sanitizer}" && return
  [[ -z ${COMPUTE_SANITIZER:-} ]] &&
    command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"
}

sanitizer=$(find_sanitizer) ||
  die "${COMPUTE_SANITIZER:-compute-sanitizer} was not found. It comes with the CUDA toolkit; set" \
    "COMPUTE_SANITIZER to where it is"
if [[ -n $binary ]]; then
  [[ -x $binary ]] || die "$binary is not a program"
else
  ensure_bazel
  "$BAZEL" build //csrc/cuda:kernels_test ||
    die "//csrc/cuda:kernels_test needs nvcc; build it elsewhere and name it as the argument"
  binary=build/bazel-bin/csrc/cuda/kernels_test
fi

for tool in memcheck racecheck; do
  say "$tool"
  start=$SECONDS status=0
  timeout -k 5 "$limit_s" "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 20 \
    "$binary" small "${TIMEOUT_S:-60}" || status=$?
  case $status in
    0) say "$tool: nothing found, $((SECONDS - start)) s" ;;
    124 | 137) die "$tool did not end in $limit_s s" ;;
    *) die "$tool failed (exit status $status); its report is above" ;;
  esac
done
