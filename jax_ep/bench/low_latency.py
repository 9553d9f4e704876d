"""`--mode=ll`: few tokens, as in decoding, on the low-latency path and on the ordinary one.

Programs are layers without their experts, one behind the other as in a decoder. On GPUs their
kernels are timed in a profiler trace, and everywhere a layer, and a program of one layer, by the
host's clock: on GPUs without and with XLA's command buffers.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep.bench import measure, peers, settings, steps, trace
from jax_ep.bench.measure import Times
from jax_ep.bench.report import Report
from jax_ep.bench.settings import Options
from jax_ep.bench.steps import Layer, compile_step

# Of a program. In the first ones ranks still wait for one another, which no median should see.
_LAYERS = 16
_MODES = ("ll", "ht")
# The kernels of each operation: a pattern of their names, and which of them in order. A start and
# its done are the same kernel.
_ALL, _STARTS, _DONES = slice(None), slice(0, None, 2), slice(1, None, 2)
_KERNELS = {
    "ll": {"dispatch": ("LowLatencyDispatchKernel", _ALL),
           "combine": ("LowLatencyCombineKernel", _ALL)},
    "ht": {"dispatch": ("PrepareKernel|DispatchKernel", _ALL), "combine": ("CombineKernel", _ALL)},
    "split": {"dispatch_start": ("LowLatencyDispatchKernel", _STARTS),
              "dispatch_done": ("LowLatencyDispatchKernel", _DONES),
              "combine_start": ("LowLatencyCombineKernel", _STARTS),
              "combine_done": ("LowLatencyCombineKernel", _DONES)},
}
# Compiler options without and with them.
_COMMAND_BUFFERS = {
    False: {"xla_gpu_enable_command_buffer": ""},
    True: {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
           "xla_gpu_graph_min_graph_size": 1},
}


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Of GPUs."""

    copy: Callable[[], jax.Array]  # keeps them busy for half a millisecond
    bytes_per_us: float  # read and written, by each of the ranks of a GPU at the same time


def run(options: Options, backend: str, report: Report) -> None:
    """Times every number of tokens of `options`; prints two tables for each dtype.

    Raises:
      ValueError: the low-latency path does not take that many tokens, or the layout.
    """
    memory = _memory(options, report) if jax.default_backend() == "gpu" else None
    sms = options.sms if backend == "cuda" else [None]
    for layout, num_sms, dtype in itertools.product(options.layouts, sms, options.dtypes):
        results = []
        for num_tokens in options.tokens:
            setting = dataclasses.replace(options.setting, num_tokens=num_tokens)
            inputs = steps.make_inputs(setting, options.ranks, dtype)
            with steps.make_group(inputs, backend, num_sms, low_latency=True) as group:
                layer = Layer(group, inputs, layout, options.capacity_factor,
                              quantize="fp8" if dtype == "fp8" else None)
                labels = {"what": backend, "dtype": dtype, "layout": layout,
                          "num_sms": group.num_sms, "tokens": num_tokens,
                          "capacity": layer.capacity,
                          "dropped": sum(measure.everyone(layer.num_dropped))}
                programs = compile_layers(layer)
                times = [_host_times(programs, options.repeats, report)]
                if memory is not None:
                    times.append(_device_times(layer, programs, memory, options.repeats, report))
                for result in itertools.chain(*times):
                    results.append(labels | result)
                    report.record(results[-1])
        on_sms = f", {num_sms or 'all'} SMs (ht: {group.num_sms})" if backend == "cuda" else ""
        report.say(f"\n{backend}{on_sms}, {dtype}, layout {layout}, microseconds")
        report.say(table(results))


def _memory(options: Options, report: Report) -> _Memory:
    inputs = steps.make_inputs(options.setting, options.ranks, "bfloat16")
    copy = peers.memory_copy(inputs)
    # By the host's clock: kernels of ranks that share a GPU may run one after the other.
    us = report.collect(measure.times(copy.call, options.repeats))["in_a_row_us"]
    rate = copy.row_bytes / us
    report.record({"what": "peer", "step": copy.name, "us": us, "row_bytes": copy.row_bytes,
                   "gb_per_s_of_a_gpu": options.ranks_per_gpu * rate / 1e3})
    report.say(f"copy of memory: {options.ranks_per_gpu * rate / 1e3:.0f} GB/s, read and written")
    return _Memory(copy.call, rate)


def ways(layer: Layer) -> dict[str, tuple[Callable, Callable]]:
    """dispatch and combine on either path and, as "split", in two phases."""
    plan = {"layout": layer.layout, "capacity": layer.capacity, "quantize": layer.quantize}

    def one_call(mode):
        return (functools.partial(jax_ep.prepare_and_dispatch, layer.group, mode=mode, **plan),
                functools.partial(jax_ep.combine, mode=mode))

    def dispatch(*batch):
        return jax_ep.dispatch_done(jax_ep.dispatch_start(layer.group, *batch, **plan))

    def combine(*rows):
        return jax_ep.combine_done(jax_ep.combine_start(*rows))

    return {mode: one_call(mode) for mode in _MODES} | {"split": (dispatch, combine)}


def layers(way: tuple[Callable, Callable], count: int) -> Callable:
    """f(x, topk_idx, topk_weights, rows): the tokens [T, H] after layers whose experts give `rows`.

    A layer takes the tokens of the one before. Its topk_idx depends on them, too, as they do behind
    a router; that is a small kernel of its own.
    """
    dispatch, combine = way

    def f(x, topk_idx, topk_weights, rows):
        for _ in range(count):
            routing = jnp.where(jnp.isnan(x[:, :1]), -1, topk_idx)  # there is no NaN
            _, row_weights, handle = dispatch(x, routing, topk_weights)
            x = combine(rows[0], handle, row_weights)
        return x

    return f


def compile_layers(layer: Layer) -> dict[tuple[str, int, bool], Callable[[], jax.Array]]:
    """Programs by way, number of layers, and whether they run in command buffers.

    On CPUs there are neither command buffers nor kernels to time, and no "split".
    """
    on_gpus = jax.default_backend() == "gpu"
    inputs = layer.inputs
    operands = inputs.x, inputs.topk_idx, inputs.topk_weights, layer.rows
    functions = ways(layer)

    def compiled(key):
        way, count, command_buffers = key
        return compile_step(way, layers(functions[way], count), inputs, *operands,
                            compiler_options=_COMMAND_BUFFERS[command_buffers] if on_gpus else None)

    keys = list(itertools.product(_MODES, (1, _LAYERS), (False, True)[: 1 + on_gpus]))
    keys += [("split", _LAYERS, False)] * on_gpus
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return {key: step.call for key, step in zip(keys, pool.map(compiled, keys))}


def _device_times(layer: Layer, programs: dict, memory: _Memory, repeats: int,
                  report: Report) -> Iterator[dict[str, Any]]:
    """The kernels of every operation: the median over layers and calls, on the slowest rank."""
    moved = bytes_moved(layer)
    for way, kernels in _KERNELS.items():
        call = programs[way, _LAYERS, False]
        measure.warm_up(call)
        profile = measure.profiled(call, repeats, before=memory.copy)
        for name, (kernel, part) in kernels.items():
            device = trace.device_microseconds(profile, repeats * _LAYERS, kernel,
                                               part) if profile else {}
            times = report.collect_device(device)
            if times["device_us"] is None:
                report.explain("operations have no times, only layers do")
                continue
            result = {"mode": way, "step": name, "us": times["device_us_max"], **times}
            if name in moved:
                num_bytes = moved[name]["memory_bytes"]
                result |= moved[name] | {"memory_floor_us": num_bytes / memory.bytes_per_us}
            yield result


def _host_times(programs: dict, repeats: int, report: Report) -> Iterator[dict[str, Any]]:
    """A program of one layer ("step"), and what each further layer adds to it ("layer")."""
    singles = {}
    for key, call in programs.items():
        measure.warm_up(call)
        singles[key] = report.collect(Times(measure.single_call(call, repeats)))["single_us"]
    for (mode, count, command_buffers), one in singles.items():
        if count == 1:
            many = singles[mode, _LAYERS, command_buffers]
            labels = {"mode": mode, "command_buffers": command_buffers}
            yield labels | {"step": "step", "us": one}
            yield labels | {"step": "layer", "us": (many - one) / (_LAYERS - 1)}


def bytes_moved(layer: Layer) -> dict[str, dict[str, int]]:
    """By operation, what crosses the link of the busiest rank, and the least in memory of a rank.

    The latter is the mean over the ranks of what is read and written: tokens and rows once, and
    what crosses twice more, in and out of a buffer.
    """
    inputs, (sent, returned) = layer.inputs, layer.bytes_per_row
    num_ranks, num_tokens, num_experts = (
        inputs.mesh.size, inputs.setting.num_tokens, inputs.setting.num_experts)
    crossing = settings.crossing_rows(inputs.routing, num_experts).sum() / num_ranks
    link = settings.link_rows(inputs.routing, num_experts)
    rows_out = int(np.prod(layer.handle.row_source.shape[1:]))  # padding is written, too
    rows_in = inputs.routing.size / num_ranks
    return {
        "dispatch": {"link_bytes": link * sent, "memory_bytes": round(
            inputs.x.nbytes / num_ranks + (2 * crossing + rows_out) * sent)},
        "combine": {"link_bytes": link * returned, "memory_bytes": round(
            (rows_in + 2 * crossing + num_tokens) * returned)},
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The lines of one dtype's results: operations, layers, and which mode is the faster one."""
    times = {(r["tokens"], r["step"], r["mode"], r.get("command_buffers")): r["us"]
             for r in results}
    floors = {(r["tokens"], r["step"]): r["memory_floor_us"] for r in results
              if "memory_floor_us" in r}
    capacities = {r["tokens"]: r["capacity"] for r in results}
    with_buffers = any(r.get("command_buffers") for r in results)

    def operation(tokens, op):
        split = [times.get((tokens, f"{op}_{phase}", "split", None))
                 for phase in ("start", "done")]
        return [*(times.get((tokens, op, mode, None)) for mode in _MODES), *split,
                floors.get((tokens, op))]

    def program(tokens, step):
        return [times.get((tokens, step, mode, buffers))
                for buffers in (False, True) for mode in _MODES]

    parts = []
    if floors:
        parts.append((("dispatch", "combine"), operation, (*_MODES, "start", "done", "memory")))
    parts.append((("layer", "step"), program, (*_MODES, "ll buf", "ht buf")))
    lines = []
    for names, cells, columns in parts:
        width = 8 * len(columns)
        lines.append(" " * 13 + "".join(f" {f' {name} ':-^{width}}" for name in names))
        lines.append(f"{'tokens':>6}{'rows':>7}" + f" {_cells(columns)}" * len(names))
        lines += [f"{tokens:>6}{capacity:>7}"
                  + "".join(f" {_cells(cells(tokens, name))}" for name in names)
                  for tokens, capacity in capacities.items()]
    for step in ("dispatch", "combine", "layer"):
        buffers = with_buffers if step == "layer" else None
        us = {mode: {tokens: times.get((tokens, step, mode, buffers)) for tokens in capacities}
              for mode in _MODES}
        if None not in us["ll"].values():
            faster = [f"{tokens} {min(_MODES, key=lambda mode: us[mode][tokens])}"
                      for tokens in capacities]
            lines.append(f"faster, {step}{' buf' if buffers else ''}: {', '.join(faster)}")
    return "\n".join(lines)


def _cells(values: Sequence[float | str | None]) -> str:
    return "".join(f"{'-' if v is None else v if isinstance(v, str) else f'{v:.1f}':>8}"
                   for v in values)
