#!/usr/bin/env bash
# Tests the ranks of all GPUs of this machine and times them, by number of GPUs too, within 8 minutes.
# A line for each step; logs and figures go into a folder. Usage: measure.sh FOLDER
#
#   PYTHON=...  a Python that has jax_ep and jax with CUDA (default: .venv's)
#   BINARY=...  //csrc/cuda:kernels_test, built elsewhere, to time the kernels without JAX too
set -uo pipefail
folder=$(realpath -m "${1:?the folder for logs and figures}")
cd "$(dirname "$0")/.." || exit
source bazel/lib.sh

limit_s=470
python=${PYTHON:-$PWD/.venv/bin/python}
export PYTHONSAFEPATH=1  # an installed jax_ep, not the sources here
mkdir -p "$folder"

# Runs a command as step $1 for at most $2 seconds, or what is left of all.
failed=()
step() {
  local name=$1 limit=$2 status=0 start=$SECONDS left=$((limit_s - SECONDS))
  shift 2
  ((limit < left)) || limit=$left
  if ((limit > 10)); then
    timeout -k 5 "$limit" "$@" >"$folder/$name.log" 2>&1 || status=$?
    say "$name: exit status $status, $((SECONDS - start)) s"
  else
    status=124
    say "$name: no time left"
  fi
  ((status == 0)) || failed+=("$name")
}
tests() { step "$1" "$2" "$python" -m jax_ep.testing.gpus --only "$3" --timeout $(($2 - 10)); }
bench() { step "$1" "$2" "$python" -m jax_ep.bench --json="$folder/$1.json" "${@:3}"; }

count=$("$python" -c "from jax_ep.testing import gpus; print(len(gpus.gpu_ids()))") ||
  die "$python has no jax_ep"
((count > 1)) || die "this is for two GPUs or more, and there are $count"

tests tests-in-one-process 150 "one process for all"
bench deepseek 70 --sms=24,32,64 --layouts=expert,rank --dtypes=bfloat16,fp8
bench low-latency 60 --mode=ll
[[ -z ${BINARY:-} ]] || step kernels 40 "$BINARY" 20 "$count"
for ((ranks = 2; ranks < count; ranks *= 2)); do
  bench "deepseek-$ranks" 50 --ranks="$ranks" --sms=32 --layouts=expert,rank \
    --dtypes=bfloat16,fp8 --nopeers --nooverlap
  bench "low-latency-$ranks" 50 --ranks="$ranks" --mode=ll --tokens=1,128
done
for setting in one-rank group-limited gpt-oss 16k; do
  bench "$setting" 40 --setting="$setting" --nopeers --nooverlap
done
tests tests-in-a-process-per-gpu 200 "one process per GPU"
((count == 2)) || tests tests-in-two-processes 100 "2 processes on all GPUs"

((${#failed[@]} == 0)) || die "failed: ${failed[*]}; see $folder"
say "all passed; logs and figures are in $folder"
