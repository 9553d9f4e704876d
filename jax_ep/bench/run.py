"""The benchmark itself: everything that `python -m jax_ep.bench` times, in the order it prints."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep import backends
from jax_ep.bench import low_latency, measure, overlap, peers, settings, steps
from jax_ep.bench.measure import everyone
from jax_ep.bench.report import Report
from jax_ep.bench.settings import Options
from jax_ep.bench.steps import Inputs, Layer

# How the options reach the processes of `--processes`.
OPTIONS_VARIABLE = "JAX_EP_BENCH_OPTIONS"

_SLOW_REPEATS = 3  # of ragged_all_to_all, 90 ms a call on two H200s


def from_environment() -> None:
    """Runs what the launching process has put into the environment."""
    run(Options.from_json(os.environ[OPTIONS_VARIABLE]))


def run(options: Options) -> None:
    """Times everything on the first devices of JAX; the first process prints.

    Raises:
      ValueError: there are fewer devices than ranks, the routing does not fit the experts, or a
        backend cannot run here.
    """
    devices = jax.devices()[: options.ranks]
    if len(devices) < options.ranks:
        raise ValueError(f"{options.ranks} ranks, and JAX has {len(devices)} devices")
    names = options.backends
    if names is None:
        on_gpus = jax.default_backend() == "gpu"
        names = ["cuda"] if on_gpus else list(dict.fromkeys([backends.choose(devices, None)[0],
                                                             "xla"]))
    fields = dataclasses.asdict(options)
    report = Report(devices, fields, _headline(options, devices), fields.pop("json_file"))
    if options.mode == "ll":
        low_latency.run(options, names[0], report)
        return
    done = set()
    before = None
    for dtype in options.dtypes:
        inputs = steps.make_inputs(options.setting, options.ranks, dtype)
        before = before or _busy(options, inputs)
        if inputs.x.dtype not in done:
            _time_peers(options, inputs, names[0], report)
        done.add(inputs.x.dtype)
        for layout, name in itertools.product(options.layouts, names):
            for num_sms in options.sms if name == "cuda" else [None]:
                _time_layer(options, inputs, layout, dtype, name, num_sms, before, report)
    if options.overlap:
        _time_overlap(options, report)


def _headline(options: Options, devices: Sequence[jax.Device]) -> str:
    setting = options.setting
    tokens = ", ".join(map(str, options.tokens))
    return (f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind} in "
            f"{jax.process_count()} processes, {os.cpu_count()} cores\n"
            f"{options.name}: {options.ranks} ranks, {tokens} tokens per rank, hidden "
            f"{setting.hidden}, top-{setting.num_topk} of {setting.num_experts} experts, routing "
            f"{setting.routing}; {options.repeats} timed calls")


def _busy(options: Options, inputs: Inputs) -> Callable[[], Any] | None:
    """What keeps GPUs busy before a profiled operation, for about a millisecond.

    None elsewhere, and where ranks share a GPU, whose kernels would run beside another's copy.
    """
    if jax.default_backend() != "gpu" or options.ranks_per_gpu > 1:
        return None
    copy = peers.memory_copy(inputs, num_bytes=1 << 31).call
    measure.warm_up(copy)
    return copy


def _time_layer(options: Options, inputs: Inputs, layout: str, dtype: str, backend: str,
                num_sms: int | None, before: Callable[[], Any] | None, report: Report) -> None:
    with steps.make_group(inputs, backend, num_sms) as group:
        layer = Layer(group, inputs, layout, options.capacity_factor,
                      quantize="fp8" if dtype == "fp8" else None)
        dropped = sum(everyone(layer.num_dropped))
        sms = f", {group.num_sms} SMs" if backend == "cuda" else ""
        report.section(f"{backend}{sms}, {dtype}, layout {layout}, capacity {layer.capacity}, "
                       f"{dropped} pairs dropped")
        labels = {"what": backend, "dtype": dtype, "layout": layout, "num_sms": group.num_sms,
                  "capacity": layer.capacity, "dropped": dropped}
        for step in layer.steps():
            report.add(step, measure.times(step.call, options.repeats, kernel=step.kernel,
                                           before=before), **labels)


def _time_overlap(options: Options, report: Report) -> None:
    inputs = steps.make_inputs(options.setting, options.ranks, options.dtypes[0])
    layout, num_sms = options.layouts[0], options.sms[0]
    with (steps.make_group(inputs, "cuda", num_sms) as plain,
          steps.make_group(inputs, "cuda", num_sms, overlap=True) as overlapped):
        report.section(f"Overlap with matrix products, {plain.num_sms} SMs")
        labels = {"what": "overlap", "dtype": str(inputs.x.dtype), "num_sms": plain.num_sms}
        layers = [Layer(group, inputs, layout, options.capacity_factor)
                  for group in (plain, overlapped)]
        for step in overlap.overlap_steps(*layers, inputs, options.repeats):
            report.add(step, measure.times(step.call, options.repeats), **labels, layout=layout)
        for step in overlap.layer_steps(plain, overlapped, inputs):
            report.add(step, measure.times(step.call, options.repeats), **labels, layout="rank")


def _time_peers(options: Options, inputs: Inputs, backend: str, report: Report) -> None:
    """The rate of memory, and with `options.peers` all that crosses the link."""
    dtype = str(inputs.x.dtype)
    labels = {"what": "peer", "dtype": dtype, "layout": None, "num_sms": None}
    on_gpus = jax.default_backend() == "gpu"
    report.section(f"Peers, {dtype}")

    def add(step: steps.Step, repeats: int = options.repeats) -> None:
        report.add(step, measure.times(step.call, repeats), **labels)

    add(peers.memory_copy(inputs) if on_gpus else peers.host_copy(inputs))
    if not options.peers:
        return
    for step in peers.gather_and_scatter(inputs):
        add(step)
    if not on_gpus:
        report.say("ragged_all_to_all and copies over the link: only on GPUs (XLA:CPU lacks the "
                   "one, and there is no link)")
        return
    for step in peers.link_copies(inputs):
        add(step)
    capacity = settings.needed_capacity(inputs.routing, inputs.setting.num_experts, "expert")
    ragged = peers.RaggedAllToAll(inputs, capacity)
    with steps.make_group(inputs, backend) as group:
        _check_ragged(ragged, Layer(group, inputs, "expert", 0))
    for step in ragged.steps():
        add(step, min(options.repeats, _SLOW_REPEATS))


def _check_ragged(ragged: peers.RaggedAllToAll, layer: Layer) -> None:
    """Raises AssertionError unless both give the same rows, in the same order."""
    def same(x, topk_idx, rows):
        mine, _ = ragged.dispatch(x, topk_idx)
        return (mine == rows[0]).all()[None]

    inputs = ragged.inputs
    result = steps.per_device(same, inputs.mesh)(inputs.x, inputs.topk_idx, layer.rows)
    shards = [bool(np.asarray(shard.data).all()) for shard in result.addressable_shards]
    assert all(shards), f"ragged_all_to_all's rows differ from those of {layer.group!r}"
