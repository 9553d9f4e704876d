"""The picture at the end of a training run."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

_INK, _MUTED, _TRAIN, _HELD_OUT = "#1f2430", "#6b7280", "#9bb8d9", "#c2410c"


def save(path: str, history: dict, uniform_nats: float, title: str) -> None:
    """Writes a PNG: the loss curves, and how every layer's load spread over its experts.

    Args:
      path: of the PNG.
      history: lists "nats" [steps], "load" [steps, layers, experts] and "held_out"
        [(step, nats), ...].
      uniform_nats: the loss of a model that knows nothing.
      title: of the figure.
    """
    plt.rcParams.update({
        "font.size": 9, "axes.edgecolor": _MUTED, "axes.labelcolor": _INK, "text.color": _INK,
        "xtick.color": _MUTED, "ytick.color": _MUTED, "axes.titlesize": 10,
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    })
    load = np.asarray(history["load"], float)
    num_layers = load.shape[1]
    figure = plt.figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, weight="bold")
    grid = figure.add_gridspec(num_layers, 2, width_ratios=(1.15, 1))
    _draw_loss(figure.add_subplot(grid[:, 0]), history, uniform_nats)

    share = load / load.mean(axis=2, keepdims=True)
    axes = [figure.add_subplot(grid[layer, 1]) for layer in range(num_layers)]
    for layer, axis in enumerate(axes):
        image = _draw_load(axis, share[:, layer])
        axis.set_title(f"Load per expert, layer {layer}")
        axis.tick_params(labelbottom=layer == num_layers - 1)
    axes[-1].set_xlabel("step")
    figure.colorbar(
        image, ax=axes, label="load / mean load", ticks=(0, 0.5, 1, 1.5, 2), extend="max", pad=0.02)
    figure.savefig(path)
    plt.close(figure)


def _draw_loss(axis, history, uniform_nats):
    steps = np.arange(1, len(history["nats"]) + 1)
    axis.plot(steps, history["nats"], color=_TRAIN, linewidth=1, label="training batch")
    held_out_steps, held_out = np.transpose(history["held_out"])
    axis.plot(held_out_steps, held_out, color=_HELD_OUT, linewidth=1.8, marker="o", markersize=3.5,
              label="held-out files")
    axis.annotate(f"{held_out[-1]:.2f}", (held_out_steps[-1], held_out[-1]), xytext=(5, -4),
                  textcoords="offset points", color=_HELD_OUT, weight="bold",
                  annotation_clip=False)
    for nats, text, x, align in ((uniform_nats, "uniform over bytes, ln 256", 0.99, "right"),
                                 (2.0, "goal", 0.02, "left")):
        axis.axhline(nats, color=_MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axis.annotate(text, (x, nats), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", ha=align, color=_MUTED)
    axis.set(title="Loss", xlabel="step", ylabel="nats per byte", xlim=(0, len(steps) * 1.01),
             ylim=(1, uniform_nats + 0.4))
    axis.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.85))


def _draw_load(axis, share):
    """`share` [steps, experts] as an image over time, white where the load is the mean."""
    image = axis.imshow(
        share.T, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2,
        extent=(0.5, len(share) + 0.5, share.shape[1] - 0.5, -0.5))
    axis.set(ylabel="expert", yticks=range(0, share.shape[1], max(1, share.shape[1] // 8)))
    return image
