"""Group(overlap=True): every operation on cuda is a call on the stream of XLA's collectives."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest
from jax.experimental import compute_on

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

CASE = Case(num_ranks=4, num_topk=3).with_capacity("tight")
ANNOTATION = '{_xla_stream_annotation = "collective", inlineable = "false"}'


def make_group(backend=None, **options):
    mesh = run.make_mesh((CASE.num_ranks,), (run.AXIS,))
    return jax_ep.Group(
        mesh, run.AXIS, num_experts=CASE.num_experts, num_topk=CASE.num_topk,
        max_tokens_per_rank=CASE.max_tokens_per_rank, max_row_bytes=256,
        backend=run.backend_name("native") if backend is None else backend,
        low_latency=False, **options)


def layer(group, x, topk_idx, weights):
    handle = run.prepare(group, CASE, topk_idx)
    rows, row_weights = jax_ep.dispatch(x, handle, weights)
    return jax_ep.combine(jnp.sin(rows), handle, row_weights)


def loss(group, *args):
    return layer(group, *args).sum()


def in_scan(group, x, *args):
    return jax.lax.scan(lambda x, _: (layer(group, x, *args), None), x, length=2)[0]


def in_vmap(group, x, *args):
    return jax.vmap(lambda x: layer(group, x, *args))(jnp.stack([x, x]))


def grad_of_checkpoint(group, *args):
    return jax.grad(jax.checkpoint(functools.partial(loss, group)))(*args)


PROGRAMS = {
    "forward": layer,
    "inner jit": lambda group, *args: jax.jit(functools.partial(layer, group))(*args),
    "grad": lambda group, *args: jax.grad(functools.partial(loss, group), (0, 2))(*args),
    "grad of checkpoint": grad_of_checkpoint,
    "scan": in_scan,
    "vmap": in_vmap,
}


def inputs():
    topk_idx = cases.routing("uniform", CASE)
    x = cases.floats(np.float32, (CASE.num_ranks, CASE.num_tokens, 8))
    return x, topk_idx, cases.floats(np.float32, topk_idx.shape)


def lowered(group, program, platform="cuda"):
    f = jax.jit(run.per_rank(group, functools.partial(PROGRAMS[program], group)))
    return f.trace(*inputs()).lower(lowering_platforms=(platform,)).as_text()


def custom_calls_by_function(text):
    """{function: the jax_ep custom calls that stand in it}."""
    found = {}
    for function in re.split(r"\n  (?=func\.func )", text)[1:]:
        name = re.match(r"func\.func (?:public |private )?@(\w+)", function)[1]
        found[name] = re.findall(r"custom_call @(jax_ep_\w+)", function)
    return {name: calls for name, calls in found.items() if calls}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_operation_is_an_annotated_call(program):
    """One operation to a function, and all calls of such functions carry the annotation."""
    with make_group(overlap=True) as group:
        text = lowered(group, program)
    functions = custom_calls_by_function(text)
    operations = {call for calls in functions.values() for call in calls}
    assert operations == {
        f"jax_ep_cuda_{op}_uncaptured" for op in ("prepare", "dispatch", "combine")}
    for name, calls in functions.items():
        assert len(calls) == 1, (name, calls)
        lines = re.findall(rf"\bcall @{name}\(.*", text)
        assert lines and all(ANNOTATION in line for line in lines), (name, lines)


def annotated_calls(text):
    """Of each call with the annotation: the line before, its own, and the rest of its region."""
    def indent(line):
        return len(line) - len(line.lstrip())

    lines = text.splitlines()
    for i, line in enumerate(lines):
        if re.search(r"\bcall @\w+\(.*_xla_stream_annotation", line):
            rest = itertools.takewhile(lambda after: indent(after) >= indent(line), lines[i + 1:])
            yield lines[i - 1], line, list(rest)


@pytest.mark.parametrize("program", PROGRAMS)
def test_operands_enter_a_call_together(program):
    """By a barrier: XLA moves constants into the function, under names that PTX does not allow."""
    with make_group(overlap=True) as group:
        calls = list(annotated_calls(lowered(group, program)))
    for before, call, _ in calls:
        operands = re.search(r"\bcall @\w+\((.*?)\)", call)[1]
        barrier = re.match(r"\s*(%\w+):(\d+) = stablehlo.optimization_barrier ", before)
        assert operands == ", ".join(f"{barrier[1]}#{i}" for i in range(int(barrier[2])))
    assert calls


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_leave_a_call_together(program):
    """Only by one barrier over all of them: taken one by one they are asynchronous, too."""
    with make_group(overlap=True) as group:
        calls = list(annotated_calls(lowered(group, program)))
    several = 0
    for _, call, rest in calls:
        found = re.match(r"\s*(%\w+):(\d+) = ", call)
        if not found:
            continue
        name, count = found.groups()
        uses = [line for line in rest if f"{name}#" in line]
        results = ", ".join(f"{name}#{i}" for i in range(int(count)))
        assert len(uses) == 1 and f"stablehlo.optimization_barrier {results} :" in uses[0]
        several += 1
    assert several


def test_no_annotation_without_overlap():
    with make_group() as group:
        text = lowered(group, "grad")
    assert "@jax_ep_cuda_dispatch(" in text
    assert "_xla_stream_annotation" not in text and "_uncaptured" not in text


@pytest.mark.parametrize("backend, platform", [(None, "cpu"), (None, "tpu"), ("xla", "cuda")])
def test_no_annotation_where_there_is_no_kernel_of_ours(backend, platform):
    with make_group(backend, overlap=True) as group:
        assert "_xla_stream_annotation" not in lowered(group, "forward", platform)


def test_annotation_is_that_of_compute_on():
    """What jax.experimental.compute_on attaches, by its name in each jax version."""
    region = getattr(compute_on, "compute_on2", compute_on.compute_on)
    on_stream = region(lambda x: x + 1, compute_type="gpu_stream:collective",
                       out_memory_spaces=jax.memory.Space.Device)
    text = jax.jit(on_stream).trace(jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
    assert f"mhlo.frontend_attributes = {ANNOTATION}" in text


def test_same_results():
    args = inputs()
    with make_group() as plain, make_group(overlap=True) as overlapped:
        results = [jax.jit(run.per_rank(group, functools.partial(PROGRAMS["grad"], group)))(*args)
                   for group in (plain, overlapped)]
        assert_same_bits(*results)
        handle = jax.block_until_ready(jax.jit(run.per_rank(
            overlapped, functools.partial(run.prepare, overlapped, CASE)))(args[1]))
    assert_same_bits(handle.slots, oracle.prepare(CASE.oracle_config, args[1]).slots)
