"""Generates text with train_moe.py's model, expert-parallel, and checks it against a dense one.

    python examples/train_moe.py --checkpoint_dir=build/checkpoints
    python examples/decode_moe.py --checkpoint_dir=build/checkpoints

On a machine without accelerators it runs on 8 CPU devices. `make decode` does both. Prompts
are given with --prompt="def " --prompt="class ".
"""

import os
import time

import jax
import numpy as np
from absl import app, flags, logging
from flax import nnx
from jax.sharding import AxisType

import decode_check
import text
from checkpoint import Checkpoints
from decoder import NUM_MICRO_BATCHES, Sampling, make_step, micro_batches
from model import ModelConfig, Transformer, make_group

FLAGS = flags.FLAGS

flags.DEFINE_string("checkpoint_dir", None, "That of train_moe.py.", required=True)
flags.DEFINE_integer("num_ranks", None, "Devices; default: all, or 8 where there are only CPUs.")
flags.DEFINE_enum("backend", None, ["cuda", "cpu", "xla"], "Of jax_ep; default: the best one here.")
flags.DEFINE_integer("sequences", 64, "A multiple of two times the devices: two micro-batches.")
flags.DEFINE_multi_string("prompt", [], "May be given several times; default: held-out text.")
flags.DEFINE_string("text_dir", None, "Of train_moe.py, for the held-out text.")
flags.DEFINE_integer("num_new", 80, "Bytes to generate for each sequence, at most.")
flags.DEFINE_string("stop", None, "A character after which a sequence ends early.")
flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest byte, more draws one.")
flags.DEFINE_integer("seed", 0, "Of the draws and of the default prompts.")
flags.DEFINE_bool("check", True, "Whether to compare with the dense model.")
flags.DEFINE_integer("show", 4, "Sequences to print.")


def main(_):
    logging.set_verbosity(logging.WARNING)  # orbax reports every file at INFO
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", FLAGS.num_ranks or 8)
    # By default GPUs round the factors of float32 products, too coarsely for the check.
    jax.config.update("jax_default_matmul_precision", "float32")
    if FLAGS.stop and len(FLAGS.stop.encode()) != 1:
        raise app.UsageError("--stop must be one byte")
    sampling = Sampling(
        FLAGS.temperature, FLAGS.seed, FLAGS.stop.encode()[0] if FLAGS.stop else None)
    num_ranks = FLAGS.num_ranks or len(jax.devices())
    mesh = jax.make_mesh(
        (num_ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_ranks])
    if FLAGS.sequences % (NUM_MICRO_BATCHES * num_ranks):
        raise app.UsageError(f"--sequences must be a multiple of {NUM_MICRO_BATCHES * num_ranks}")

    checkpoints = Checkpoints(FLAGS.checkpoint_dir)
    if checkpoints.latest_step() is None:
        raise app.UsageError(f"{FLAGS.checkpoint_dir} has no checkpoint; see train_moe.py")
    config = ModelConfig(**checkpoints.info()["config"])
    tokens_per_rank = FLAGS.sequences // (NUM_MICRO_BATCHES * num_ranks)
    with make_group(mesh, config, tokens_per_rank, FLAGS.backend) as group:
        print(f"{group}: {group.backend_reason}")
        graphdef, params = restore(checkpoints, config, group)
        batches = micro_batches(nnx.merge(graphdef, params), group, prompts(), FLAGS.num_new)
        batches = generate(make_step(graphdef, params, group, sampling), params, batches)
        show(batches)
        passed = not FLAGS.check or decode_check.check(
            decode_check.compare(graphdef, params, batches, sampling))
    return 0 if passed else 1


def restore(checkpoints, config, group):
    """(graphdef, params) of the newest checkpoint, placed on the group's mesh."""
    model = nnx.eval_shape(lambda: Transformer(config, group, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        params, nnx.get_named_sharding(params, group.mesh))
    return graphdef, checkpoints.params(like)


def prompts():
    """--prompt in turn for all sequences, or pieces of 8 to 32 bytes of text not trained on."""
    if FLAGS.prompt:
        return [FLAGS.prompt[i % len(FLAGS.prompt)].encode() for i in range(FLAGS.sequences)]
    _, held_out = text.load(FLAGS.text_dir)
    pieces = text.sample(held_out, FLAGS.sequences, 32, (FLAGS.seed,))
    lengths = np.random.default_rng(FLAGS.seed).integers(8, 33, FLAGS.sequences)
    return [piece[:length].tobytes() for piece, length in zip(pieces, lengths)]


def generate(step, params, batches):
    """Steps until every sequence has ended; prints the speed."""
    position = np.int32(0)
    step = step.lower(params, batches, position).compile()
    start_time, running = time.perf_counter(), True
    while running:
        batches, ranks_running = step(params, batches, position)
        running = np.any(ranks_running)  # waits, as a server would to send the bytes
        position += np.int32(1)
    seconds = time.perf_counter() - start_time
    num_new = sum(int(np.sum(batch.end - batch.prompt_length)) for batch in batches)
    print(f"Generated {num_new} bytes in {position} steps of {seconds / position * 1e3:.2f} ms: "
          f"{num_new / seconds:.0f} tokens/s")
    return batches


def show(batches):
    """Prints the first sequences, what was generated after a bar."""
    for batch in batches:
        for written, prompt_length, end, sequence in zip(*jax.device_get(
                (batch.text, batch.prompt_length, batch.end, batch.sequence))):
            if sequence < FLAGS.show:
                prompt, new = (
                    part.tobytes().decode(errors="replace")
                    for part in (written[:prompt_length], written[prompt_length:end]))
                print(f"--- {sequence}\n{prompt}|{new}")
    print("---")


if __name__ == "__main__":
    app.run(main)
