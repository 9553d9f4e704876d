"""What programs lower to per platform, jax.export, and the persistent compilation cache."""

import functools
import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax_ep
import numpy as np
import pytest

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

CASE = Case(num_ranks=4, num_topk=3).with_capacity("tight")


def layer(group, x, topk_idx, topk_weights):
    handle = run.prepare(group, CASE, topk_idx)
    rows, row_weights = jax_ep.dispatch(x, handle, topk_weights)
    return jax_ep.combine(rows, handle, row_weights), jax_ep.combine(rows, handle)


def inputs():
    topk_idx = cases.routing("uniform", CASE)
    x = cases.floats(np.float32, (4, CASE.num_tokens, 8))
    return x, topk_idx, cases.floats(np.float32, topk_idx.shape)


def program(backend):
    group = run.group_of(CASE, backend)
    return jax.jit(run.per_rank(group, functools.partial(layer, group)))


def custom_calls(text):
    """The names of this package's custom call targets in StableHLO text."""
    return set(re.findall(r"custom_call\s*@(jax_ep\w+)", text))


def lowered_for(backend, platform):
    lowered = program(backend).trace(*inputs()).lower(lowering_platforms=(platform,))
    return custom_calls(lowered.as_text())


def test_cuda_lowers_to_the_cuda_targets():
    assert lowered_for("native", "cuda") == {
        "jax_ep_cuda_prepare", "jax_ep_cuda_dispatch", "jax_ep_cuda_combine"}


def test_other_platforms_lower_to_the_reference():
    assert lowered_for("native", "tpu") == set()


@pytest.mark.skipif(os.environ.get("JAX_PLATFORMS") != "cpu", reason="the cpu backend")
def test_cpu_lowers_to_ffi_calls_of_its_own():
    targets = lowered_for("native", "cpu")
    assert len(targets) >= 3 and not any("cuda" in target for target in targets)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_reference_lowers_to_no_custom_call(platform):
    assert lowered_for("xla", platform) == set()


def test_gradient_lowers_for_cuda():
    group = run.group_of(CASE, "native")

    def loss(x, topk_idx, topk_weights):
        return layer(group, x, topk_idx, topk_weights)[0].sum()

    f = jax.jit(run.per_rank(group, jax.grad(loss, (0, 2))))
    text = f.trace(*inputs()).lower(lowering_platforms=("cuda",)).as_text()
    assert {"jax_ep_cuda_dispatch", "jax_ep_cuda_combine"} <= custom_calls(text)


def test_export_round_trip(backend):
    f, args = program(backend), inputs()
    platform = jax.devices()[0].platform
    targets = lowered_for(backend, {"gpu": "cuda"}.get(platform, platform))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = jax.export.export(f, disabled_checks=allowed)(*args)
    if importlib.util.find_spec("flatbuffers"):  # which jax's serialization needs
        exported = jax.export.deserialize(exported.serialize())
    mesh = run.group_of(CASE, backend).mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(run.AXIS))
    placed = [jax.device_put(a, sharding) for a in args]
    result = jax.jit(exported.call)(*placed)
    assert_same_bits(result, f(*args))
    x, topk_idx, _ = args
    plan = oracle.prepare(CASE.oracle_config, topk_idx)
    assert_same_bits(result[1], oracle.combine(plan, oracle.dispatch(plan, x)))


CACHE_SCRIPT = """
import os, sys
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
sys.path.insert(0, sys.argv[2])
import test_lowering
f, args = test_lowering.program(sys.argv[3]), test_lowering.inputs()
f = f.lower(*args)
del events[:]
y = f.compile()(*args)[1]
hits = sum(name.endswith("compilation_cache/cache_hits") for name in events)
print(f"result {hits} {float(abs(y).sum()):.6f}")
"""


@pytest.mark.slow
def test_persistent_compilation_cache(backend, tmp_path):
    """A second process takes the program from the cache: nothing in it differs between runs."""
    def run_once():
        out = subprocess.run(
            [sys.executable, "-c", CACHE_SCRIPT, str(tmp_path), os.path.dirname(__file__), backend],
            check=True, capture_output=True, text=True, timeout=120)
        hits, total = re.search(r"result (\d+) (\S+)", out.stdout).groups()
        return int(hits), total

    (cold, first), (warm, second) = run_once(), run_once()
    assert (cold, warm) == (0, 1)
    assert first == second
