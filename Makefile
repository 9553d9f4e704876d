# Everything a user or CI types. The work is in bazel/*.sh.
#
#   PYTHON=...  the interpreter for .venv, or for the wheel (default: the first Python >= 3.11 found)
#               or, for test-gpu and measure, a Python that has jax_ep and jax with CUDA (default:
#               .venv's)
#   BINARY=...  for sanitize and measure, a csrc/cuda/kernels_test that has been built elsewhere
#   BAZEL=...   the Bazel (default: bazel or bazelisk on the PATH, else Debian's, installed)

# What `make decode` decodes with; written when the training has ended.
trained := build/decode_moe/400

.PHONY: help setup test test-fast test-gpu measure sanitize demo decode bench wheel lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##/make \1 -/p' Makefile

setup:  ## make .venv ready and build the native code into it; quick when nothing changed
	@bazel/setup.sh

test: setup  ## all tests, C++ and Python, with the oldest and the newest supported jax
	@bazel/test.sh

test-fast: setup  ## the Python tests that are not slow
	@.venv/bin/python -m pytest -q -m "not slow" tests

test-gpu: $(if $(PYTHON),,setup)  ## the quick tests on the GPUs here, their ranks arranged in every way
	@PYTHONSAFEPATH=1 $(or $(PYTHON),.venv/bin/python) -m jax_ep.testing.gpus

measure: $(if $(PYTHON),,setup)  ## test and time all GPUs here together, into build/measured, in 8 minutes
	@bazel/measure.sh build/measured

sanitize:  ## the kernels under compute-sanitizer, on a GPU here
	@bazel/sanitize.sh $(BINARY)

demo: setup  ## train a small MoE language model, expert-parallel over 8 CPU devices
	@.venv/bin/python examples/train_moe.py

decode: setup $(trained)  ## generate text with such a model (trained once), two micro-batches overlapped
	@.venv/bin/python examples/decode_moe.py --checkpoint_dir=$(dir $(trained)) --temperature=0.7

$(trained): | setup
	@.venv/bin/python examples/train_moe.py --checkpoint_dir=$(dir $@) --steps=$(notdir $@)

bench: setup  ## time dispatch and combine, on 8 CPU devices or all GPUs
	@.venv/bin/python -m jax_ep.bench

wheel:  ## write dist/*.whl for one Python
	@bazel/wheel.sh dist

lock:  ## write requirements/*.txt anew
	@bazel/lock.sh 0.10.2 0.12.0.1

clean:  ## remove all that the other commands wrote
	@bazel/clean.sh
