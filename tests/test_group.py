"""Group: axes, several at once, life time, capacities."""

import concurrent.futures
import functools
import threading
import time
import types

import jax
import jax_ep
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax_ep import backends

from jax_ep.testing import cases, oracle, run
from jax_ep.testing.cases import Case
from jax_ep.testing.compare import assert_same_bits

CASE = Case(num_ranks=4, num_topk=3)


def make(mesh, axis, backend, case=CASE, **options):
    settings = dict(num_experts=case.num_experts, num_topk=case.num_topk,
                    max_tokens_per_rank=case.max_tokens_per_rank, max_row_bytes=64)
    return jax_ep.Group(mesh, axis, backend=run.backend_name(backend), **(settings | options))


def layer(group, case, x, topk_idx):
    handle = run.prepare(group, case, topk_idx)
    rows, _ = jax_ep.dispatch(x, handle)
    return rows, jax_ep.combine(rows, handle)


def inputs(case=CASE, seed=0, copies=1):
    """x and topk_idx of `copies` independent groups, one behind the other."""
    topk_idx = [cases.routing("uniform", case, seed + i) for i in range(copies)]
    x = cases.floats(np.float32, (copies * case.num_ranks, case.num_tokens, 4), seed)
    return x, np.concatenate(topk_idx)


def check(case, x, topk_idx, rows, y):
    plan = oracle.prepare(case.oracle_config, topk_idx)
    expected = oracle.dispatch(plan, x)
    assert_same_bits(rows, expected)
    assert_same_bits(y, oracle.combine(plan, expected))


def test_attributes(backend):
    mesh = run.make_mesh((2, 4), ("data", "expert"))
    with make(mesh, "expert", backend, timeout_s=7) as group:
        assert group.mesh is mesh or group.mesh == mesh
        assert group.axis_names == ("expert",)
        assert (group.num_ranks, group.num_experts, group.num_local_experts) == (4, 8, 2)
        assert (group.num_topk, group.max_tokens_per_rank, group.max_row_bytes) == (3, 8, 64)
        assert group.backend == run.backend_name(backend)
        assert group.timeout_s == 7
        assert isinstance(group.backend_reason, str) and group.backend_reason
        assert isinstance(group.workspace_bytes, int) and group.workspace_bytes >= 0
        assert not group.closed
        group.check()
    assert group.closed


def test_default_backend_is_the_native_one_of_the_platform():
    mesh = run.make_mesh((2,), ("expert",))
    with jax_ep.Group(mesh, "expert", num_experts=4, num_topk=1, max_tokens_per_rank=1,
                      max_row_bytes=4) as group:
        assert group.backend == run.backend_name("native")
        assert group.backend_reason


@pytest.mark.parametrize("capability, built, backend, reason", [
    ("9.0", True, "cuda", "native on platform 'gpu'"),
    ("7.5", True, "xla", "compute capability 7.5"),
    (None, True, "xla", "not an NVIDIA GPU"),
    ("9.0", False, "xla", "not built"),
], ids=["new", "old", "other", "not_built"])
def test_default_backend_on_gpus(capability, built, backend, reason, monkeypatch):
    """The native one, unless something is in the way; asking for it then says what."""
    monkeypatch.setattr(backends, "has_cuda", lambda: built)
    gpus = [types.SimpleNamespace(platform="gpu", device_kind="a GPU",
                                  compute_capability=capability)] * 2
    chosen, why = backends.choose(gpus, None)
    assert chosen == backend and reason in why
    if backend == "cuda":
        assert backends.choose(gpus, "cuda")[0] == "cuda"
    else:
        with pytest.raises(ValueError, match=reason):
            backends.choose(gpus, "cuda")


@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
def test_tuple_of_axes_is_flattened_row_major(axis, backend):
    with make(run.make_mesh((2, 2), ("a", "b")), axis, backend) as group:
        assert group.axis_names == axis and group.num_ranks == 4
        x, topk_idx = inputs()
        rows, y = jax.jit(run.per_rank(group, functools.partial(layer, group, CASE)))(x, topk_idx)
        check(CASE, x, topk_idx, rows, y)


@pytest.mark.parametrize("shape, names", [((2, 4), ("data", "expert")),
                                          ((4, 2), ("expert", "data"))])
def test_other_axes_are_independent(shape, names, backend):
    with make(run.make_mesh(shape, names), "expert", backend) as group:
        x, topk_idx = inputs(copies=2)
        f = run.per_rank(group, functools.partial(layer, group, CASE), ("data", "expert"))
        rows, y = jax.jit(f)(x, topk_idx)
        for i in range(2):
            part = slice(4 * i, 4 * i + 4)
            check(CASE, x[part], topk_idx[part], rows[part], y[part])


def test_tuple_of_axes_beside_another_axis(backend):
    """Axes that are not neighbours in the mesh, in the other order."""
    with make(run.make_mesh((2, 2, 2), ("a", "data", "b")), ("b", "a"), backend) as group:
        x, topk_idx = inputs(copies=2)
        f = run.per_rank(group, functools.partial(layer, group, CASE), ("data", "b", "a"))
        rows, y = jax.jit(f)(x, topk_idx)
        for i in range(2):
            part = slice(4 * i, 4 * i + 4)
            check(CASE, x[part], topk_idx[part], rows[part], y[part])


def test_several_groups_in_one_program(backend):
    """Different settings, also over different axes of one mesh, at the same time."""
    mesh = run.make_mesh((2, 4), ("data", "expert"))
    small = Case(num_ranks=2, num_topk=1, num_tokens=CASE.num_tokens, layout="rank")
    with make(mesh, "expert", backend) as one, make(mesh, "data", backend, small) as two:
        assert one.id != two.id
        (x, topk_idx), (_, small_idx) = inputs(copies=2), inputs(small, copies=4)

        def f(x, topk_idx, small_idx):
            return layer(one, CASE, x, topk_idx), layer(two, small, x, small_idx)

        first, second = jax.jit(run.per_rank(one, f, ("data", "expert")))(x, topk_idx, small_idx)
        for i in range(2):
            part = slice(4 * i, 4 * i + 4)
            check(CASE, x[part], topk_idx[part], *(np.asarray(a)[part] for a in first))
        for j in range(4):
            part = slice(j, 8, 4)
            check(small, x[part], small_idx[part], *(np.asarray(a)[part] for a in second))


def test_groups_of_equal_settings_are_interchangeable_in_time(backend):
    """A new Group after a closed one works, and the compiled programs do not mix them up."""
    mesh = run.make_mesh((4,), ("expert",))
    x, topk_idx = inputs()
    for _ in range(2):
        with make(mesh, "expert", backend) as group:
            f = jax.jit(run.per_rank(group, functools.partial(layer, group, CASE)))
            check(CASE, x, topk_idx, *f(x, topk_idx))


def test_use_after_close(backend):
    mesh = run.make_mesh((4,), ("expert",))
    group = make(mesh, "expert", backend)
    x, topk_idx = inputs()
    handle = jax.jit(run.per_rank(group, functools.partial(run.prepare, group, CASE)))(topk_idx)
    group.close()
    group.close()  # once more is harmless
    assert group.closed
    closed = pytest.raises((RuntimeError, ValueError), match="closed")
    with closed:
        jax.eval_shape(run.per_rank(group, functools.partial(layer, group, CASE)), x, topk_idx)
    with closed:
        jax.eval_shape(run.per_rank(group, lambda x, h: jax_ep.dispatch(x, h)[0]), x, handle)
    with closed:
        jax.eval_shape(run.per_rank(group, lambda x, h: jax_ep.combine(x, h)),
                       np.zeros((4, *CASE.row_dims, 4), np.float32), handle)


def test_compiled_program_of_a_closed_group_raises():
    """A program that is compiled already meets the closed Group at run time."""
    if run.backend_name("native") == "cuda":
        pytest.skip("there XLA may replay it: tests/gpu/test_ranks.py")
    group = make(run.make_mesh((4,), ("expert",)), "expert", "native")
    f = jax.jit(run.per_rank(group, functools.partial(layer, group, CASE)))
    jax.block_until_ready(f(*inputs()))
    group.close()
    with pytest.raises(Exception, match="closed"):
        jax.block_until_ready(f(*inputs()))


def test_closing_ends_a_wait():
    """A rank that waits for others when its Group is closed gets an error then, not at timeout_s."""
    if run.backend_name("native") != "cpu":
        pytest.skip("closing waits for kernels there")
    group = make(run.make_mesh((4,), ("expert",)), "expert", "native", timeout_s=100)
    closed = threading.Event()

    def late(rank, x):
        if rank != 0:
            closed.wait(60)
        return x

    def f(x, topk_idx):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(late, like, jax.lax.axis_index("expert"), x)
        return layer(group, CASE, x, topk_idx)

    program = jax.jit(run.per_rank(group, f, check_vma=False))
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        result = pool.submit(lambda: jax.block_until_ready(program(*inputs())))
        time.sleep(1)
        group.close()
        closed.set()
        with pytest.raises(Exception, match="closed"):
            result.result()
    assert time.monotonic() - start < 50


def test_context_manager_closes_on_error(backend):
    with pytest.raises(KeyError):
        with make(run.make_mesh((2,), ("expert",)), "expert", backend) as group:
            raise KeyError
    assert group.closed


def test_capacity_helpers():
    mesh = run.make_mesh((4,), ("expert",))
    with make(mesh, "expert", "xla", max_tokens_per_rank=100) as group:
        # R = 4, E_local = 2, K = 3.
        worst_cases = {layout: group.worst_case_capacity(50, layout=layout, expert_alignment=8)
                       for layout in oracle.LAYOUTS}
        assert worst_cases == {"expert": 4 * 50 * 3 + 2 * 7, "rank": 4 * 50, "padded": 4 * 50}
        # The mean load: T*K pairs per rank; padded: R*T*K/E per expert.
        assert group.capacity(1.0) == 300
        assert group.capacity(1.25) == 375
        assert group.capacity(1.25, num_tokens=50) >= 1.25 * 50 * 3
        assert group.capacity(1.0, layout="padded") == 150
        for layout in oracle.LAYOUTS:
            for alignment in (1, 8, 128):
                options = dict(layout=layout, expert_alignment=alignment)
                worst = group.worst_case_capacity(100, **options)
                assert group.capacity(1e6, **options) == worst
                capacities = [group.capacity(f, **options) for f in (0.5, 1.0, 1.5, 2.0)]
                assert capacities == sorted(capacities)
                assert all(isinstance(c, int) and 0 < c <= worst for c in capacities)


def test_handle_of_another_mesh_is_refused(backend):
    """A handle belongs to its group; within shard_map over another mesh it is an error."""
    case = Case(num_ranks=2)
    handle = run.runner(case, backend).prepare(cases.routing("uniform", case))
    mesh = run.make_mesh((4,), ("expert",))
    x = np.zeros((4, case.num_tokens, 4), np.float32)
    handle = jax.tree.map(lambda a: np.concatenate([a, a]), handle)
    f = jax.shard_map(
        lambda x, h: jax_ep.dispatch(x[0], jax.tree.map(lambda a: a[0], h))[0],
        mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    with pytest.raises(ValueError, match="mesh"):
        jax.eval_shape(f, x, handle)
