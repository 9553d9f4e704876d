"""Trains a small MoE transformer on Python's standard library, expert-parallel over a mesh.

    python examples/train_moe.py
    python examples/train_moe.py --steps=1000 --checkpoint_dir=build/checkpoints

On a machine without accelerators it runs on as many CPU devices as the mesh has.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
import time

import jax
import numpy as np
import optax
import tqdm
from absl import app, flags, logging
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import dense_check
import plot
import text
from checkpoint import Checkpoints
from model import VOCABULARY, ModelConfig, Transformer, loss_fn, make_group

FLAGS = flags.FLAGS

flags.DEFINE_integer("steps", 400, "Training steps, those before a resume included.")
flags.DEFINE_integer("batch_size", 8, "Pieces of text per step.")
flags.DEFINE_integer("length", 128, "Bytes per piece.")
flags.DEFINE_float("learning_rate", 4e-3, "Peak learning rate.")
flags.DEFINE_float("aux_weight", 0.03, "Weight of the load-balance loss.")
flags.DEFINE_integer("eval_every", 50, "Steps between looks at the held-out text.")
flags.DEFINE_integer("seed", 0, "Of the parameters and of the pieces of text.")
flags.DEFINE_list("mesh", ["2", "4"], "Devices along the axes data and expert.")
flags.DEFINE_enum("backend", None, ["cuda", "cpu", "xla"], "Of jax_ep; default: the best one here.")
flags.DEFINE_string("text_dir", None, "Folder of .py files; default: the standard library.")
flags.DEFINE_string("output_dir", "build/train_moe", "Where the PNG and the JSON go.")
flags.DEFINE_string("checkpoint_dir", None, "Where to save, and to resume from; default: nowhere.")
flags.DEFINE_integer("checkpoint_every", 100, "Steps between checkpoints.")
for field in dataclasses.fields(ModelConfig):
    define = flags.DEFINE_float if field.name == "capacity_factor" else flags.DEFINE_integer
    define(field.name, field.default, f"{field.name} of the model.")


def main(_):
    start_time = time.perf_counter()
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    mesh_shape = tuple(int(size) for size in FLAGS.mesh)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", math.prod(mesh_shape))
    mesh = jax.make_mesh(mesh_shape, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    if FLAGS.batch_size % mesh.size:
        raise app.UsageError(f"--batch_size must be a multiple of the {mesh.size} devices")
    config = ModelConfig(
        **{field.name: getattr(FLAGS, field.name) for field in dataclasses.fields(ModelConfig)})
    tokens_per_step = FLAGS.batch_size * FLAGS.length

    with make_group(mesh, config, tokens_per_step // mesh.size, FLAGS.backend) as group:
        print(f"{group}: {group.backend_reason}")
        passed = run(mesh, config, group, tokens_per_step)
    print(f"Took {time.perf_counter() - start_time:.0f} s")
    return 0 if passed else 1


def run(mesh, config, group, tokens_per_step):
    """Trains, reports and checks; whether the check against the dense model passed."""
    training_text, held_out_text = text.load(FLAGS.text_dir)
    print(f"Text: {len(training_text) / 1e6:.1f} MB for training, "
          f"{len(held_out_text) / 1e6:.1f} MB held out")

    def batch(source, *seed):
        pieces = text.sample(source, FLAGS.batch_size, FLAGS.length, (FLAGS.seed, *seed))
        return jax.device_put(pieces, NamedSharding(mesh, P(mesh.axis_names)))

    optimizer = make_optimizer(FLAGS.steps, FLAGS.learning_rate)
    graphdef, params, opt_state = init(config, group, optimizer)
    history = {"nats": [], "load": [], "held_out": []}
    num_params = sum(x.size for x in jax.tree.leaves(params))
    print(f"Model: {num_params / 1e6:.2f} M parameters, {config}")

    checkpoints = Checkpoints(FLAGS.checkpoint_dir) if FLAGS.checkpoint_dir else None
    if checkpoints and checkpoints.latest_step() is not None:
        params, opt_state = checkpoints.params(params), checkpoints.optimizer(opt_state)
        history = checkpoints.info()["history"]
        print(f"Resuming after step {len(history['nats'])} of {FLAGS.checkpoint_dir}")

    train_step, eval_step = make_steps(graphdef, optimizer, params, opt_state)

    def held_out_loss(params):
        return float(np.mean([eval_step(params, batch(held_out_text, i)) for i in range(16)]))

    if not history["held_out"]:
        history["held_out"].append((0, held_out_loss(params)))
    bar = tqdm.tqdm(total=FLAGS.steps, initial=len(history["nats"]), unit="step",
                    mininterval=0.1 if sys.stderr.isatty() else 10)
    for step in range(len(history["nats"]) + 1, FLAGS.steps + 1):
        step_time = time.perf_counter()
        params, opt_state, nats, stats = train_step(params, opt_state, batch(training_text, step))
        history["nats"].append(float(nats))
        history["load"].append(stats.expert_load.tolist())
        step_time = time.perf_counter() - step_time
        if step % FLAGS.eval_every == 0 or step == FLAGS.steps:
            history["held_out"].append((step, held_out_loss(params)))
        load = np.mean(stats.expert_load, axis=0)
        bar.set_postfix({
            "nats": f"{nats:.2f}",
            "held out": f"{history['held_out'][-1][1]:.2f}",
            "tokens/s": f"{tokens_per_step / step_time:.0f}",
            "load max/mean": f"{load.max() / load.mean():.2f}",
            "dropped": f"{np.sum(stats.num_dropped) / stats.topk_idx.size:.1%}",
        }, refresh=False)
        bar.update()
        if checkpoints and (step % FLAGS.checkpoint_every == 0 or step == FLAGS.steps):
            info = {"config": dataclasses.asdict(config), "history": history}
            checkpoints.save(step, params, opt_state, info)
    bar.close()
    if checkpoints:
        checkpoints.close()

    first, last = history["held_out"][0][1], history["held_out"][-1][1]
    print(f"Held-out loss: {first:.3f} -> {last:.3f} nats per byte in {FLAGS.steps} steps "
          f"(uniform: {math.log(VOCABULARY):.3f})")
    write_report(
        history,
        f"{num_params / 1e6:.1f} M parameter MoE transformer on {mesh.size} devices: "
        f"{config.num_experts} experts, top-{config.num_topk}, backend {group.backend}")
    differences = dense_check.compare(
        graphdef, params, batch(held_out_text, 0), FLAGS.aux_weight)
    return dense_check.check(differences)


def make_optimizer(steps, learning_rate):
    """AdamW with a short warm-up and a cosine down to a twentieth."""
    warmup = min(20, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 20)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))


def init(config, group, optimizer):
    """(graphdef, params, optimiser state), placed: experts over "expert", the rest everywhere."""
    model = Transformer(config, group, rngs=nnx.Rngs(FLAGS.seed))
    graphdef, params = nnx.split(model)
    params = jax.device_put(params, nnx.get_named_sharding(params, group.mesh))
    everywhere = NamedSharding(group.mesh, P())
    opt_state = jax.tree.map(
        lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere),
        optimizer.init(params))
    return graphdef, params, opt_state


def make_steps(graphdef, optimizer, params, opt_state):
    """The compiled training step and evaluation."""
    # The state comes out placed as it went in, so that the second step is not compiled anew.
    placement = jax.tree.map(lambda x: x.sharding, (params, opt_state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*placement, None, None))
    def train_step(params, opt_state, tokens):
        def loss(params):
            return loss_fn(nnx.merge(graphdef, params), tokens, FLAGS.aux_weight)

        grads, (nats, stats) = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, nats, stats

    @jax.jit
    def eval_step(params, tokens):
        return loss_fn(nnx.merge(graphdef, params), tokens)[1][0]

    return train_step, eval_step


def write_report(history, title):
    folder = pathlib.Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.json").write_text(json.dumps(history))
    plot.save(folder / "train_moe.png", history, math.log(VOCABULARY), title)
    print(f"Wrote {folder / 'train_moe.png'} and {folder / 'history.json'}")


if __name__ == "__main__":
    app.run(main)
