"""Draws results of the benchmark: `python -m jax_ep.bench.plot FILE... --out docs/performance.svg`.

One row per file of `python -m jax_ep.bench --json=FILE`: dispatch and combine by number of SMs, and
beside the peers; with --mode=ll dispatch, combine and a layer by number of tokens. Needs
matplotlib.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

_INK, _MUTED, _PEER = "#1f2430", "#6b7280", "#9bb8d9"
_COLORS = ("#c2410c", "#1d4ed8", "#0f766e", "#a21caf", "#ca8a04", "#334155")
_BARS = ("prepare", "dispatch", "combine")
# The peer of each operation that every rank's own link bounds alike.
_PEERS = {"dispatch": "all_gather", "combine": "psum_scatter"}
_LINK_COPIES = ("device_put", "ppermute")


def save(path: str, runs: Sequence[dict[str, Any]]) -> None:
    """Writes the figure of several runs; the path's ending says in which format.

    Args:
      path: of the figure.
      runs: what the benchmark's JSON files hold.
    """
    plt.rcParams.update({
        "font.size": 8.5, "axes.edgecolor": _MUTED, "axes.labelcolor": _INK, "text.color": _INK,
        "xtick.color": _MUTED, "ytick.color": _MUTED, "axes.titlesize": 9.5,
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
        "svg.fonttype": "none", "svg.hashsalt": "jax_ep",
    })
    figure = plt.figure(figsize=(12, 3.6 * len(runs)), layout="constrained")
    rows = figure.subfigures(len(runs), squeeze=False)[:, 0]
    for row, run in zip(rows, runs):
        row.suptitle(_title(run), x=0.01, ha="left", fontsize=10, weight="bold")
        if _is_low_latency(run):
            for axis, step in zip(row.subplots(1, 3), ("dispatch", "combine", "layer")):
                _draw_by_tokens(axis, run["results"], step)
            continue
        left, middle, right = row.subplots(1, 3, width_ratios=(1, 1, 1.1))
        for axis, step in ((left, "dispatch"), (middle, "combine")):
            _draw_by_sms(axis, run["results"], step)
        _draw_bars(right, run["results"])
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def _is_low_latency(run: dict[str, Any]) -> bool:
    return run.get("mode") == "ll"  # files of before there were modes have none


def _title(run: dict[str, Any]) -> str:
    setting = run["setting"]
    tokens = "" if _is_low_latency(run) else f"{setting['num_tokens']} x "
    return (f"{run['name']}: {run['ranks']} ranks as {run['processes']} processes on "
            f"{run['devices'][0]}, {tokens}{setting['hidden']}, top-"
            f"{setting['num_topk']} of {setting['num_experts']} ({run['date'][:10]}, "
            f"jax {run['jax']}{', ' + run['commit'] if run['commit'] else ''})")


def _series(results: list[dict], step: str) -> dict[str, list[tuple[int, float]]]:
    """By variant of our backend, (SMs, microseconds) of a step."""
    series = {}
    for result in results:
        if result["step"] == step:
            label = f"{result['what']}, {result['dtype']}, {result['layout']}"
            series.setdefault(label, []).append((result["num_sms"] or 0, result["us"]))
    return {label: sorted(points) for label, points in series.items()}


def _draw_by_sms(axis, results, step):
    for color, (label, points) in zip(_COLORS, _series(results, step).items()):
        axis.plot(*zip(*points), color=color, marker="o", markersize=3.5, linewidth=1.6,
                  label=label)
    peers = {result["step"]: result for result in results if result["what"] == "peer"}
    lines = {}
    if _PEERS[step] in peers:
        lines[_PEERS[step]] = peers[_PEERS[step]]["us"]
    rates = [peers[name]["link_gb_per_s"] for name in _LINK_COPIES if name in peers]
    if rates and max(rates):
        dtypes = {}  # by the bytes on the link: combine's are the same, whatever dispatch casts to
        for result in results:
            if result["step"] == step and result["link_bytes"]:
                dtypes.setdefault(result["link_bytes"], {})[result["dtype"]] = None
        for link_bytes, names in dtypes.items():
            lines[f"raw copy of its bytes, {', '.join(names)}"] = link_bytes / max(rates) / 1e3
    for label, us in lines.items():
        axis.axhline(us, color=_MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axis.annotate(label, (0.99, us), xycoords=("axes fraction", "data"), xytext=(0, 2),
                      textcoords="offset points", ha="right", color=_MUTED, fontsize=7.5)
    axis.set(title=f"{step}: microseconds by SMs", xlabel="SMs", ylim=(0, None))
    axis.legend(frameon=False, fontsize=7.5)


def _draw_by_tokens(axis, results, step):
    """Modes and dtypes, on logarithmic axes; a dashed line is in command buffers."""
    series = {}
    for result in results:
        if result["step"] == step and result.get("mode"):
            key = result["dtype"], result["mode"], bool(result.get("command_buffers"))
            series.setdefault(key, []).append((result["tokens"], result["us"]))
    variants = list(dict.fromkeys(key[:2] for key in series))
    for (dtype, mode, command_buffers), points in series.items():
        axis.plot(*zip(*points), color=_COLORS[variants.index((dtype, mode))], marker="o",
                  markersize=3.5, linewidth=1.6, linestyle="--" if command_buffers else "-",
                  label=f"{dtype}, {mode}{', command buffers' * command_buffers}")
    axis.set(title=f"{step}: microseconds by tokens per rank", xlabel="tokens")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    if series:
        axis.legend(frameon=False, fontsize=7.5)


def _draw_bars(axis, results):
    """The best of each operation of each variant, and the peers, on a logarithmic axis."""
    best = {}
    for result in results:
        peer = result["what"] == "peer"
        if not peer and (result["step"] not in _BARS or not result["us"]):
            continue
        label = result["step"] if peer else (
            f"{result['step']}, {result['what']}, {result['dtype']}, {result['layout']}")
        us, _ = best.get(label, (float("inf"), peer))
        best[label] = min(us, result["us"]), peer
    labels = sorted(best, key=lambda label: -best[label][0])
    values = [best[label][0] for label in labels]
    bars = axis.barh(range(len(labels)), values, log=True,
                     color=[_PEER if best[label][1] else _COLORS[0] for label in labels])
    axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=2, fontsize=6.5)
    axis.set_yticks(range(len(labels)), labels, fontsize=6.5)
    axis.set(title="microseconds, best number of SMs; peers pale")
    axis.margins(x=0.15)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="of python -m jax_ep.bench --json=FILE")
    parser.add_argument("--out", default="performance.svg", help="the figure to write")
    options = parser.parse_args(argv)
    runs = []
    for name in options.files:
        with open(name) as file:
            runs.append(json.load(file))
    save(options.out, runs)


if __name__ == "__main__":
    main()
