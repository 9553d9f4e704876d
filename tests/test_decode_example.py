"""The decode example: its text is the dense model's, and its check notices where it is not."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ep.testing import jaxprs, run

ROOT = pathlib.Path(__file__).resolve().parents[1]
NUM_RANKS = min(4, len(jax.devices()))
NUM_NEW = 6
LAYERS, TOPK = 2, 3


class Decoder:
    """A tiny model with random weights, and the modules of the example."""

    def __init__(self, example_module, backend, num_ranks=NUM_RANKS):
        self.num_ranks = num_ranks
        self.decoder, self.check, self.dense, model = map(
            example_module, ("decoder", "decode_check", "dense_check", "model"))
        config = model.ModelConfig(
            num_layers=LAYERS, width=16, num_heads=2, expert_width=8, num_experts=8, num_topk=TOPK)
        mesh = run.make_mesh((num_ranks,), ("expert",))
        self.group = model.make_group(mesh, config, 2, run.backend_name(backend))
        self.graphdef, shapes = nnx.split(
            nnx.eval_shape(lambda: model.Transformer(config, self.group, rngs=nnx.Rngs(0))))
        rng = np.random.default_rng(0)
        self.params = jax.tree.map(
            lambda x, sharding: jax.device_put(
                rng.normal(scale=0.4, size=x.shape).astype(x.dtype), sharding),
            shapes, nnx.get_named_sharding(shapes, mesh))

    def start(self, sampling):
        """The step, and the micro-batches before the first one, two sequences a rank each."""
        rng = np.random.default_rng(0)
        prompts = [rng.bytes(1 + i % 5) for i in range(4 * self.num_ranks)]
        batches = self.decoder.micro_batches(
            nnx.merge(self.graphdef, self.params), self.group, prompts, NUM_NEW)
        return self.decoder.make_step(self.graphdef, self.params, self.group, sampling), batches

    def generate(self, sampling):
        """The micro-batches after the last step."""
        step, batches = self.start(sampling)
        for position in range(batches[0].text.shape[1] - 1):
            batches, running = step(self.params, batches, np.int32(position))
            if not np.any(running):
                break
        return batches

    def dense_text(self, batches, sampling):
        """What the dense model writes by itself, choosing experts and bytes one after the other."""
        params = jax.device_put(jax.device_get(self.params), jax.devices()[0])

        def moe(layer, x):
            return self.dense.dense_moe(layer, x, jax.lax.top_k(x @ layer.router[...], TOPK)[1])

        @jax.jit
        def scores(params, text, sequence, position):
            logits, _ = nnx.merge(self.graphdef, params)(text.astype(jnp.int32), moe)
            return sampling.scores(logits[:, position], sequence, position)

        text, prompt_length, end, sequence = joined(batches)
        text = np.where(np.arange(text.shape[1]) < prompt_length[:, None], text, 0)
        for position in range(text.shape[1] - 1):
            new = np.argmax(scores(params, text, sequence, position), axis=-1)
            written = (prompt_length <= position + 1) & (position + 1 < end)
            text[written, position + 1] = new[written]
        return text


def joined(batches):
    """text, prompt_length, end and sequence of all micro-batches."""
    names = ("text", "prompt_length", "end", "sequence")
    return [np.concatenate([getattr(batch, name) for batch in batches]) for name in names]


@pytest.fixture
def decoder(example_module, backend):
    decoder = Decoder(example_module, backend)
    with decoder.group, jax.default_matmul_precision("float32"):  # GPUs' default is coarser
        yield decoder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_the_dense_model(decoder, temperature):
    sampling = decoder.decoder.Sampling(temperature, seed=3)
    batches = decoder.generate(sampling)
    text, prompt_length, end, _ = joined(batches)
    assert len(batches) == 2 and set(prompt_length) == set(range(1, min(5, 4 * NUM_RANKS) + 1))
    np.testing.assert_array_equal(end, prompt_length + NUM_NEW)
    np.testing.assert_array_equal(text, decoder.dense_text(batches, sampling))
    assert len(np.unique(text, axis=0)) > 1

    comparison = decoder.check.compare(decoder.graphdef, decoder.params, batches, sampling)
    assert comparison.num_compared == len(text) * NUM_NEW
    assert comparison.mismatches == [] and comparison.routing_error < 0
    assert decoder.check.check(comparison)


def test_one_device_decodes_too(example_module):
    """Where placing an array copies nothing, and no array may be donated twice."""
    decoder = Decoder(example_module, "native", num_ranks=1)
    with decoder.group:
        text, prompt_length, end, _ = joined(decoder.generate(decoder.decoder.Sampling()))
    np.testing.assert_array_equal(end, prompt_length + NUM_NEW)
    assert text.any(axis=1).all()


def test_an_ended_sequence_stays_as_it_is_and_has_no_experts(decoder):
    greedy = decoder.decoder.Sampling()
    text, prompt_length, end, _ = joined(decoder.generate(greedy))
    stop = int(text[0, prompt_length[0] + 1])
    stopping = dataclasses.replace(greedy, stop=stop)
    batches = decoder.generate(stopping)
    stopped_text, _, stopped_end, _ = joined(batches)
    experts = np.concatenate([batch.experts for batch in batches])

    for i, (whole, first) in enumerate(zip(text, prompt_length)):
        generated = whole[first:end[i]].tolist()
        length = generated.index(stop) + 1 if stop in generated else NUM_NEW
        assert stopped_end[i] == first + length
        np.testing.assert_array_equal(stopped_text[i, :stopped_end[i]], whole[:stopped_end[i]])
        assert not stopped_text[i, stopped_end[i]:].any()
        # Nothing follows the last byte, so it went to no expert either.
        assert (experts[i, :stopped_end[i] - 1] >= 0).all()
        assert (experts[i, stopped_end[i] - 1:] == -1).all()
    assert (stopped_end < end).any()

    comparison = decoder.check.compare(decoder.graphdef, decoder.params, batches, stopping)
    assert comparison.num_compared == (stopped_end - prompt_length).sum()
    assert decoder.check.check(comparison)


def test_the_check_notices_another_byte_and_another_expert(decoder):
    greedy = decoder.decoder.Sampling()
    first, second = decoder.generate(greedy)
    compare = lambda batch: decoder.check.compare(
        decoder.graphdef, decoder.params, (first, batch), greedy)

    # The last byte, after which nothing else can differ.
    where = 1, int(second.end[1]) - 1
    byte = int(second.text[where])
    comparison = compare(dataclasses.replace(second, text=second.text.at[where].set(byte ^ 1)))
    [mismatch] = comparison.mismatches
    assert (mismatch.sequence, mismatch.position) == (int(second.sequence[1]), where[1])
    assert (mismatch.generated, mismatch.dense) == (byte ^ 1, byte)
    assert mismatch.generated_score < mismatch.dense_score and not mismatch.is_tie
    assert not decoder.check.check(comparison)

    where = 0, 0, LAYERS - 1
    worst = next(e for e in range(8) if e not in second.experts[where])
    experts = second.experts.at[(*where, 0)].set(worst)
    comparison = compare(dataclasses.replace(second, experts=experts))
    assert comparison.routing_error > decoder.dense.TIE_TOLERANCE
    assert not decoder.check.check(comparison)


def test_a_tie_is_told_and_hides_no_difference(example_module, capsys):
    module = example_module("decode_check")
    tie = module.Mismatch(3, 17, ord("a"), ord("b"), 9.99999, 10.0, largest=12.0)
    different = dataclasses.replace(tie, sequence=4, generated_score=9.99)
    assert tie.is_tie and not different.is_tie
    assert not dataclasses.replace(tie, generated_score=float("nan")).is_tie

    assert module.check(module.Comparison(100, [tie], -0.1))
    printed = capsys.readouterr().out
    assert "99 of 100" in printed and "1 are ties" in printed and "0 DIFFER" in printed
    assert "tie: sequence 3, byte 17: generated b'a' of score 9.99999, dense b'b' of score 10" in (
        printed)
    assert not module.check(module.Comparison(100, [tie, different], -0.1))
    assert "DIFFERENT: sequence 4, byte 17" in capsys.readouterr().out
    assert module.check(module.Comparison(100, [], 1e-7))
    assert "tie within rounding" in capsys.readouterr().out
    assert not module.check(module.Comparison(100, [], float("nan")))


def test_micro_batches_take_turns(example_module):
    log = []

    def micro_batch(name):
        before = yield
        for stage in range(3):
            log.append((before, f"{name}{stage}"))
            before = yield f"{name}{stage}"
        return name

    assert example_module("decoder").take_turns([micro_batch("a"), micro_batch("b")]) == ("a", "b")
    assert log == [(None, "a0"), ("a0", "b0"), ("b0", "a1"), ("a1", "b1"), ("b1", "a2"),
                   ("a2", "b2")]


def test_tokens_move_while_the_other_micro_batch_computes(decoder):
    step, batches = decoder.start(decoder.decoder.Sampling())
    trace = step.trace(decoder.params, batches, np.int32(0))
    [body] = [equation.params["jaxpr"] for equation in jaxprs.equations(trace.jaxpr)
              if equation.primitive.name == "shard_map"]
    order, depends_on = [], {}
    for equation in body.eqns:
        before = set().union(*(depends_on.get(id(x), set()) for x in equation.invars))
        name = equation.primitive.name
        phase = re.fullmatch(r"jax_ep_((?:dispatch|combine)_(?:start|done))", name)
        if phase:
            # What the jaxpr's order says is also what XLA must keep.
            assert before >= {i for i, other in enumerate(order) if other.endswith("start")}
            before = before | {len(order)}
            order.append(phase[1])
        depends_on.update((id(x), before) for x in equation.outvars)

    send, receive = ["dispatch_start"], ["combine_done"]
    experts = ["dispatch_done", "combine_start"]
    between_layers = 2 * experts + 2 * (receive + send)
    assert order == 2 * send + (LAYERS - 1) * between_layers + 2 * experts + 2 * receive


def test_wrong_prompts_are_named(decoder):
    model = nnx.merge(decoder.graphdef, decoder.params)
    for prompts, message in [
        ([b"a"] * (2 * NUM_RANKS + 1), "multiple of"),
        ([], "multiple of"),
        ([b"a", b""] * NUM_RANKS, "empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder.decoder.micro_batches(model, decoder.group, prompts, NUM_NEW)


@pytest.mark.slow
def test_it_decodes_what_the_training_example_saved(tmp_path):
    text_dir = pathlib.Path(sysconfig.get_path("stdlib"), "asyncio")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    def example(name, *flags):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / name, f"--checkpoint_dir={tmp_path / 'saved'}",
             f"--text_dir={text_dir}", *flags],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    example("train_moe.py", "--steps=3", "--eval_every=3", "--length=16", "--num_layers=1",
            "--width=16", "--num_heads=2", "--expert_width=8", f"--output_dir={tmp_path}")
    printed = example("decode_moe.py", "--sequences=16", "--num_new=5", "--show=2",
                      "--prompt=def ", "--prompt=class ")
    assert "Generated 80 bytes in 10 steps" in printed and "tokens/s" in printed
    assert "\ndef |" in printed and "\nclass |" in printed
    assert "all 80 generated bytes are equal" in printed
