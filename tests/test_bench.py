"""The benchmark: what it counts, how it reads traces, and that its command runs."""

import functools
import inspect
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax_ep
import numpy as np
import pytest
from jax_ep.bench import __main__ as command
from jax_ep.bench import low_latency, measure, overlap, peers, run, settings, steps, trace
from jax_ep.bench.settings import Setting

from jax_ep.testing import oracle
from jax_ep.testing.compare import assert_same_bits

STEPS = ["prepare", "dispatch", "combine", "forward", "forward+backward"]
SMALL = Setting(num_tokens=37, hidden=32, num_experts=16, num_topk=3)


def bench(*flags, tmp_path):
    """Runs the command on CPU devices; returns its output and its JSON."""
    out = tmp_path / "results.json"
    sizes = ["--tokens=16", "--hidden=128", "--experts=8", "--topk=2", "--repeats=2"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("XLA_FLAGS", None)
    result = subprocess.run(
        [sys.executable, "-m", "jax_ep.bench", *sizes, f"--json={out}", *flags], env=env,
        capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(out.read_text())


def small_group(inputs, **options):
    return steps.make_group(inputs, {"gpu": "cuda"}.get(jax.default_backend(), "cpu"), **options)


@pytest.fixture(params=settings.ROUTINGS)
def routing(request):
    """A setting, and topk_idx of 4 ranks."""
    setting = Setting(37, 32, 32, 3, request.param)
    return setting, settings.topk(setting, 4)[0]


@pytest.fixture(scope="module")
def command_run(tmp_path_factory):
    """Output and JSON of one run of the command."""
    return bench("--ranks=2", "--dtypes=float32", "--layouts=expert,padded", "--backends=cpu",
                 tmp_path=tmp_path_factory.mktemp("bench"))


def test_command(command_run):
    output, document = command_run
    results = document["results"]
    for layout in ("expert", "padded"):
        mine = [r for r in results if r["layout"] == layout]
        assert [r["step"] for r in mine] == STEPS
        assert all((r["what"], r["dtype"], r["dropped"]) == ("cpu", "float32", 0) for r in mine)
    assert {r["step"] for r in results if r["what"] == "peer"} == {
        "all_gather", "psum_scatter", "memcpy of the rows"}
    assert all(r["us"] > 0 and r["single_us"] > 0 for r in results)
    assert all(r["link_gb_per_s"] > 0 for r in results if r["step"] == "combine")
    assert document["jax"] == jax.__version__ and document["date"]
    assert all(step in output for step in STEPS)


@pytest.mark.slow
def test_several_processes(tmp_path):
    output, document = bench("--ranks=4", "--processes=2", "--dtypes=bfloat16", "--nopeers",
                             tmp_path=tmp_path)
    assert document["processes"] == 2 and document["ranks"] == 4
    assert [(r["what"], r["step"]) for r in document["results"]] == [
        ("peer", "memcpy of the rows"), *(("xla", step) for step in STEPS)]
    assert output.count("\nforward+backward ") == 1  # one process prints


@pytest.mark.parametrize("dtype", [
    "bfloat16",
    pytest.param("fp8", marks=pytest.mark.skipif(
        "quantize" not in inspect.signature(jax_ep.dispatch).parameters,
        reason="dispatch does not quantize")),
])
def test_bytes_on_the_wire(dtype):
    """Values once per token and other rank; with fp8 also their scales."""
    setting = Setting(37, 256, 16, 3)
    inputs = steps.make_inputs(setting, 2, dtype)
    with small_group(inputs) as group:
        layer = steps.Layer(group, inputs, "rank", 1.25, None if dtype == "bfloat16" else dtype)
        by_name = {step.name: step for step in layer.steps()}
        for step in by_name.values():
            jax.block_until_ready(step.call())
    rows = settings.link_rows(inputs.routing, 16)
    sent = {"bfloat16": 256 * 2, "fp8": 256 + 256 // 128 * 4}[dtype]
    assert by_name["dispatch"].link_bytes == rows * sent
    assert by_name["combine"].link_bytes == rows * 256 * 2
    assert by_name["forward+backward"].link_bytes == rows * (sent + 3 * 256 * 2)


def test_link_rows_counts_tokens_per_other_rank(routing):
    setting, topk_idx = routing
    sent, received = np.zeros(4, int), np.zeros(4, int)
    for source, tokens in enumerate(topk_idx):
        for experts in tokens:
            for target in {expert // 8 for expert in experts} - {source}:
                sent[source] += 1
                received[target] += 1
    assert settings.link_rows(topk_idx, 32) == max(sent.max(), received.max())


@pytest.mark.parametrize("layout", ["expert", "rank", "padded"])
def test_needed_capacity_is_just_enough(routing, layout):
    setting, topk_idx = routing
    needed = settings.needed_capacity(topk_idx, 32, layout)

    def dropped(capacity):
        config = oracle.Config(num_experts=32, max_tokens_per_rank=37, layout=layout,
                               capacity=capacity, expert_alignment=1)
        plan = oracle.prepare(config, topk_idx)
        kept = sum((np.asarray(source) >= 0).sum() for source in plan.row_source)
        return np.asarray(plan.num_dropped).sum(), kept

    assert dropped(needed) == (0, settings.kept_rows(topk_idx, 32, layout))
    assert dropped(needed - 1)[0] > 0


def test_routings(routing):
    setting, topk_idx = routing
    assert topk_idx.shape == (4, 37, 3) and topk_idx.min() >= 0 and topk_idx.max() < 32
    assert (np.diff(np.sort(topk_idx)) > 0).all(), "a token names an expert twice"
    if setting.routing == "one-rank":
        assert topk_idx.max() < 8
    else:
        assert topk_idx.max() >= 24


def test_group_limited_routing_uses_four_of_eight_groups():
    topk_idx, _ = settings.topk(Setting(500, 8, 64, 8, "group-limited"), 1)
    num_groups = [len(set(token // 8)) for token in topk_idx[0]]
    assert max(num_groups) == 4


def test_too_few_experts_on_one_rank():
    with pytest.raises(ValueError, match="one-rank.*top-8"):
        settings.topk(Setting(4, 8, 16, 8, "one-rank"), 4)


def profile(lines, plane="/device:GPU:0"):
    """A profile with one plane of {line: [(kernel, start ns, duration ns), ...]}."""
    names = sorted({kernel for events in lines.values() for kernel, _, _ in events})
    text = f'planes {{ id: 1 name: "{plane}"\n'
    for i, (line, events) in enumerate(lines.items()):
        text += f'lines {{ id: {i} name: "{line}" timestamp_ns: 1000\n'
        for kernel, start, duration in events:
            text += (f"events {{ metadata_id: {names.index(kernel) + 1} "
                     f"offset_ps: {start * 1000} duration_ps: {duration * 1000} }}\n")
        text += "}\n"
    for i, kernel in enumerate(names, 1):
        text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{kernel}" }} }}\n'
    return jax.profiler.ProfileData.from_text_proto(text + "}")


@pytest.mark.parametrize("kernel, call", [("DispatchKernel", "beforecall"), ("", "call")])
def test_devices_are_kept_busy_in_the_profile_of_a_kernel(kernel, call, monkeypatch):
    log = []

    def record(calls):
        log.append("profile")
        calls()

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(trace, "record", record)
    measure.times(lambda: log.append("call"), 3, kernel=kernel,
                  before=lambda: log.append("before"))
    unprofiled, profiled = "".join(log).split("profile")
    assert unprofiled == "call" * (1 + 4 + 3 + 3)  # to warm up, single, in a row
    assert profiled == call * 3


CALLS = {
    "Stream #7(Kernel)": [("void jax_ep::cuda::DispatchKernel<A>(Args)", 0, 3000),
                          ("fusion", 4000, 1000),
                          ("void jax_ep::cuda::DispatchKernel<A>(Args)", 10000, 5000),
                          ("fusion", 16000, 1000),
                          ("void jax_ep::cuda::DispatchKernel<A>(Args)", 20000, 4000),
                          ("fusion", 25000, 1000)],
    "XLA Modules": [("jit_dispatch", 0, 26000)],
}


def test_trace_takes_the_median_of_the_named_kernel():
    assert trace.device_microseconds(profile(CALLS), 3, "DispatchKernel") == {0: 4.0}


def test_trace_sums_all_kernels_of_a_call():
    assert trace.device_microseconds(profile(CALLS), 3) == {0: 5.0}


def test_trace_counts_kernels_at_the_same_time_once():
    lines = {"Stream #7(Kernel)": [("a", 0, 10000), ("a", 20000, 10000)],
             "Stream #9(Kernel,MemcpyP2P)": [("b", 5000, 7000), ("b", 22000, 1000)]}
    assert trace.device_microseconds(profile(lines), 2) == {0: 11.0}


def test_trace_with_kernels_of_no_equal_share_takes_the_mean():
    lines = {"Stream #7(Kernel)": [("a", 0, 1000), ("a", 2000, 2000), ("a", 5000, 3000)]}
    assert trace.device_microseconds(profile(lines), 2) == {0: 3.0}


def test_trace_of_an_unknown_layout_is_empty():
    assert trace.device_microseconds(profile(CALLS, plane="/device:CUSTOM"), 3) == {}
    assert trace.device_microseconds(profile({"Queue 1": CALLS["Stream #7(Kernel)"]}), 3) == {}
    assert trace.device_microseconds(profile(CALLS), 3, "CombineKernel") == {}


def test_trace_of_this_machine_is_read():
    recorded = trace.record(lambda: jax.block_until_ready(jnp.ones(5) + 1))
    assert [plane.name for plane in recorded.planes]
    if jax.default_backend() == "cpu":
        assert trace.device_microseconds(recorded, 1) == {}


def test_trace_tells_a_start_from_its_done():
    """Both are the same kernel, and take turns."""
    kernel = "void jax_ep::cuda::(anonymous namespace)::LowLatencyDispatchKernel(Args)"
    lines = {"Stream #7(Kernel)": [(kernel, 0, 1000), (kernel, 2000, 5000), ("fusion", 8000, 1),
                                   (kernel, 10000, 2000), (kernel, 13000, 6000),
                                   (kernel, 20000, 3000), (kernel, 24000, 7000)]}

    def microseconds(op):
        name, part = low_latency._KERNELS["split"][op]
        return trace.device_microseconds(profile(lines), 3, name, part)

    assert microseconds("dispatch_start") == {0: 2.0}
    assert microseconds("dispatch_done") == {0: 6.0}
    assert microseconds("combine_start") == {}


def test_trace_of_prepare_and_dispatch_is_their_sum():
    kernels = "PrepareKernel", "DispatchKernel<A>", "CombineKernel"
    lines = {"Stream #7(Kernel)": [
        *zip(kernels, (0, 5000, 8000), (4000, 2000, 9000)),
        *zip(kernels, (20000, 27000, 30000), (6000, 2000, 9000))]}
    name, part = low_latency._KERNELS["ht"]["dispatch"]
    assert trace.device_microseconds(profile(lines), 2, name, part) == {0: 7.0}


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *,
                      axis_name):
    """What the documentation of jax.lax.ragged_all_to_all says, which XLA:CPU does not have."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, targets = map(
        gather, (operand, input_offsets, send_sizes, output_offsets))
    me, row = jax.lax.axis_index(axis_name), jnp.arange(operand.shape[0])
    for source in range(operands.shape[0]):
        at = row - starts[source, me]
        sent = (at >= 0) & (at < sizes[source, me])
        output = output.at[jnp.where(sent, at + targets[source, me], output.shape[0])].set(
            operands[source], mode="drop")
    return output


def ragged_layer(inputs):
    capacity = settings.needed_capacity(inputs.routing, SMALL.num_experts, "expert")
    return peers.RaggedAllToAll(inputs, capacity)


def test_ragged_all_to_all_gives_the_rows_of_layout_expert(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    inputs = steps.make_inputs(SMALL, 4, "float32")
    ragged = ragged_layer(inputs)

    def both(x, topk_idx, topk_weights):
        rows, way = ragged.dispatch(x, topk_idx)
        theirs = rows, ragged.combine(rows, way, topk_weights)
        handle = layer.prepare(topk_idx)
        rows, row_weights = layer.dispatch(x, handle, topk_weights)
        return theirs, (rows, layer.combine(rows, handle, row_weights))

    with small_group(inputs) as group:
        layer = steps.Layer(group, inputs, "expert", 0)
        results = steps.per_device(both, inputs.mesh)(
            inputs.x, inputs.topk_idx, inputs.topk_weights)
        (rows, y), (expected_rows, expected_y) = jax.block_until_ready(results)
    assert_same_bits(rows, expected_rows)
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)


def test_ragged_all_to_all_lowers_for_cuda():
    inputs = steps.make_inputs(SMALL, 4, "bfloat16")
    ragged = ragged_layer(inputs)
    program = steps.per_device(lambda x, i: ragged.dispatch(x, i)[0], inputs.mesh)
    lowered = program.trace(inputs.x, inputs.topk_idx).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@ragged_all_to_all") == 1


def test_copies_move_what_they_count():
    inputs = steps.make_inputs(SMALL, 4, "float32")
    permuted, put = peers.link_copies(inputs)
    x = np.asarray(inputs.x).reshape(4, 37, 32)
    assert_same_bits(np.asarray(permuted.call()).reshape(x.shape), np.roll(x, 1, axis=0))
    assert_same_bits(np.stack(put.call()), x)
    devices = list(inputs.mesh.devices.flat)
    assert [array.device for array in put.call()] == devices[1:] + devices[:1]
    assert permuted.link_bytes == put.link_bytes == x[0].nbytes
    copied = peers.memory_copy(inputs, num_bytes=64)
    assert copied.row_bytes == 2 * 64 and copied.call().nbytes == 4 * 64


def test_overlap_steps():
    """Both programs give what dispatch alone does."""
    inputs = steps.make_inputs(SMALL, 2, "float32")
    with small_group(inputs) as plain, small_group(inputs, overlap=True) as overlapped:
        layers = [steps.Layer(group, inputs, "expert", 1.25) for group in (plain, overlapped)]
        alone, chain, *both = overlap.overlap_steps(*layers, inputs, 2, matrix_size=64)
        expected = alone.call(), chain.call()
        for step in both:
            product, rows = step.call()
            assert_same_bits(rows, expected[0])
            assert_same_bits(product, expected[1])


def test_layer_in_halves():
    """Gives what the whole layer does, and the two Groups the same."""
    inputs = steps.make_inputs(SMALL, 2, "float32")
    with small_group(inputs) as plain, small_group(inputs, overlap=True) as overlapped:
        layer, *halves = [np.asarray(step.call())
                          for step in overlap.layer_steps(plain, overlapped, inputs, 64)]
    assert layer.any()
    np.testing.assert_allclose(halves[0], layer, rtol=1e-5, atol=1e-5 * np.abs(layer).max())
    assert_same_bits(*halves)


@pytest.fixture(scope="module")
def low_latency_run(tmp_path_factory):
    """Output and JSON of one run of the command with --mode=ll."""
    return bench("--mode=ll", "--ranks=2", "--tokens=1,3", tmp_path=tmp_path_factory.mktemp("ll"))


def test_low_latency_command(low_latency_run):
    output, document = low_latency_run
    assert document["mode"] == "ll" and document["tokens"] == [1, 3]
    found = {(r["dtype"], r["tokens"], r["mode"], r["step"]) for r in document["results"]}
    assert found == set(itertools.product(
        ["bfloat16", "fp8"], [1, 3], ["ll", "ht"], ["step", "layer"]))
    assert all((r["what"], r["dropped"]) == ("cpu", 0) for r in document["results"])
    assert all(r["us"] > 0 for r in document["results"] if r["step"] == "step")
    assert output.count("faster, layer: 1 ") == 2  # a table for each dtype


def test_tokens_are_one_number_without_low_latency(tmp_path):
    with pytest.raises(AssertionError, match="--tokens is one number"):
        bench("--tokens=1,3", tmp_path=tmp_path)


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("layout", ["expert", "padded"])
def test_layers_are_the_same_in_all_ways(layout, quantize):
    """And the last one's sums are those of combine alone."""
    inputs = steps.make_inputs(Setting(37, 256, 16, 3), 2, "bfloat16")
    operands = inputs.x, inputs.topk_idx, inputs.topk_weights
    with small_group(inputs, low_latency=True) as group:
        layer = steps.Layer(group, inputs, layout, 1.25, quantize)
        expected = {step.name: step for step in layer.steps()}["combine"].call()
        ways = low_latency.ways(layer)
        assert list(ways) == ["ll", "ht", "split"]
        for way in ways.values():
            program = steps.per_device(low_latency.layers(way, 3), inputs.mesh)
            assert_same_bits(program(*operands, layer.rows), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_bytes_of_low_latency(dtype):
    """Tokens and rows once in memory, what crosses also into a buffer and out of it."""
    inputs = steps.make_inputs(Setting(37, 256, 16, 3), 2, dtype)
    with small_group(inputs, low_latency=True) as group:
        layer = steps.Layer(group, inputs, "padded", 1.25, None if dtype == "bfloat16" else dtype)
        moved = low_latency.bytes_moved(layer)
    sent, returned = {"bfloat16": 256 * 2, "fp8": 256 + 256 // 128 * 4}[dtype], 256 * 2
    crossing = sum(bool(set(token // 8) - {rank}) for rank, tokens in enumerate(inputs.routing)
                   for token in tokens) / 2
    assert moved["dispatch"]["memory_bytes"] == (
        37 * 256 * 2 + (2 * crossing + 8 * layer.capacity) * sent)
    assert moved["combine"]["memory_bytes"] == (37 * 3 + 2 * crossing + 37) * returned
    link = settings.link_rows(inputs.routing, 16)
    assert [moved[op]["link_bytes"] for op in moved] == [link * sent, link * returned]


def test_low_latency_on_gpus(monkeypatch, tmp_path, capsys):
    """What is timed there, and the tables of it; a trace stands for the GPUs."""
    us = {"LowLatencyDispatchKernel": 7.5, "PrepareKernel|DispatchKernel": 30.5,
          "LowLatencyCombineKernel": 40.5, "CombineKernel": 20.5}

    def device_microseconds(profile, num_calls, kernel="", part=slice(None)):
        assert num_calls in (1, low_latency._LAYERS)
        return dict.fromkeys((d.local_hardware_id for d in jax.devices()),
                             us.get(kernel, 1.0) + (part.start or 0))

    monkeypatch.setattr(trace, "device_microseconds", device_microseconds)
    monkeypatch.setattr(low_latency.peers, "memory_copy", functools.partial(
        peers.memory_copy, num_bytes=64))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    file = tmp_path / "ll.json"
    run.run(settings.Options(
        mode="ll", ranks=2, ranks_per_gpu=1, name="small", setting=SMALL, tokens=[1, 37],
        dtypes=["bfloat16"], layouts=["expert"], sms=[None], backends=["cpu"], capacity_factor=1.25,
        repeats=1, peers=False, overlap=False, json_file=str(file)))
    results = json.loads(file.read_text())["results"][1:]
    host = [(mode, step, buffers) for mode in ("ll", "ht") for step in ("step", "layer")
            for buffers in (False, True)]
    device = [*itertools.product(("ll", "ht"), ("dispatch", "combine"), [None]),
              *(("split", f"{op}_{phase}", None) for op in ("dispatch", "combine")
                for phase in ("start", "done"))]
    for tokens in (1, 37):
        found = [(r["mode"], r["step"], r.get("command_buffers"))
                 for r in results if r["tokens"] == tokens]
        assert len(found) == len(set(found)) and set(found) == {*host, *device}
    output = capsys.readouterr().out
    assert "     7.5    30.5     7.5     8.5" in output  # dispatch: ll, ht, start, done
    assert "    40.5    20.5    40.5    41.5" in output
    assert "faster, dispatch: 1 ll, 37 ll\nfaster, combine: 1 ht, 37 ht" in output


@pytest.mark.parametrize("gpus, processes, expected", [
    ("0", 2, (("0",), ("0",))),
    ("0,1", 2, (("0",), ("1",))),
    ("0,1", 4, (("0",), ("0",), ("1",), ("1",))),
    ("0,1,2,3", 2, (("0", "1"), ("2", "3"))),
])
def test_processes_share_the_gpus_evenly(gpus, processes, expected):
    assert command.spread(gpus.split(","), processes) == expected


def test_plot(command_run, tmp_path):
    pytest.importorskip("matplotlib")
    from jax_ep.bench import plot

    _, document = command_run
    by_sms = [result | {"num_sms": num_sms, "us": 1000 / num_sms}
              for result in document["results"] if result["what"] == "cpu"
              for num_sms in (16, 32)]
    document = document | {"results": document["results"] + by_sms}
    file, figure = tmp_path / "by_sms.json", tmp_path / "figure.svg"
    file.write_text(json.dumps(document))
    plot.main([str(file), str(file), "--out", str(figure)])
    assert figure.read_text().count("dispatch: microseconds by SMs") == 2


def test_plot_of_low_latency(low_latency_run, tmp_path):
    pytest.importorskip("matplotlib")
    from jax_ep.bench import plot

    _, document = low_latency_run
    file, figure = tmp_path / "ll.json", tmp_path / "figure.svg"
    file.write_text(json.dumps(document))
    plot.main([str(file), "--out", str(figure)])
    assert "layer: microseconds by tokens per rank" in figure.read_text()
    assert "fp8, ll" in figure.read_text()
