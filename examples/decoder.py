"""Expert-parallel decoding: two micro-batches, one of which computes while the other's tokens move.

A micro-batch is written as a generator. It yields wherever it would have to wait, which is after
each `dispatch_start` and `combine_start`, and `take_turns` goes on with the other one.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_ep
from model import VOCABULARY, KVCache, Transformer

NUM_MICRO_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next byte follows from the logits, and where a sequence ends early.

    Attributes:
      temperature: 0 takes the likeliest byte; more draws one, by the Gumbel-max trick.
      seed: of the draws. Each (sequence, position) has noise of its own, so that a model which
        decodes them in another order or all at once draws the same bytes.
      stop: a byte after which a sequence ends; None for none.
    """

    temperature: float = 0.0
    seed: int = 0
    stop: int | None = None

    def scores(self, logits: jax.Array, sequence: jax.Array, position: jax.Array) -> jax.Array:
        """Logits [..., 256] with noise; the byte with the largest score is next.

        `sequence` and `position` say whose logits they are, in shapes that broadcast to [...].
        """
        if not self.temperature:
            return logits
        key = jax.random.key(self.seed)

        def noise(sequence, position):
            own = jax.random.fold_in(jax.random.fold_in(key, sequence), position)
            return jax.random.gumbel(own, (VOCABULARY,))

        return logits + self.temperature * jnp.vectorize(noise, signature="(),()->(v)")(
            sequence, position)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """B sequences side by side in one decode step. The first dimension is spread over the ranks.

    Sequences begin at position 0 and are at the same position in every step: the longer prompts
    are still being read while the shorter ones already go on.

    Attributes:
      text: uint8 [B, length], the prompts, and from their ends on the bytes generated so far.
      prompt_length: int32 [B], at least 1.
      end: int32 [B], the length at which a sequence ends, at most `length`.
      sequence: int32 [B], the number of each sequence.
      experts: int32 [B, length, layers, K], the experts chosen at the positions so far; -1 after.
      caches: one for each layer.
    """

    text: jax.Array
    prompt_length: jax.Array
    end: jax.Array
    sequence: jax.Array
    experts: jax.Array
    caches: tuple[KVCache, ...]


def micro_batches(
    model: Transformer, group: jax_ep.Group, prompts: Sequence[bytes], num_new: int
) -> tuple[MicroBatch, ...]:
    """The prompts as two micro-batches, each of which gets up to `num_new` bytes more.

    Raises:
      ValueError: an empty prompt, or a number of prompts that two times the ranks do not divide.
    """
    parts = NUM_MICRO_BATCHES * group.num_ranks
    if not prompts or len(prompts) % parts:
        raise ValueError(f"the number of prompts must be a multiple of {parts}, that of ranks "
                         f"times {NUM_MICRO_BATCHES} micro-batches, got {len(prompts)}")
    if not all(prompts):
        raise ValueError("a prompt is empty; there must be a byte to follow")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    length = int(lengths.max()) + num_new
    text = np.array([list(prompt.ljust(length, b"\0")) for prompt in prompts], np.uint8)

    def micro_batch(sequence):
        batch = len(sequence)
        return MicroBatch(
            text[sequence], lengths[sequence], lengths[sequence] + num_new, sequence,
            jnp.full((batch, length, len(model.blocks), group.num_topk), -1, jnp.int32),
            tuple(block.attention.empty_cache(batch, length) for block in model.blocks))

    sequences = np.split(np.arange(len(prompts), dtype=np.int32), NUM_MICRO_BATCHES)
    placement = NamedSharding(group.mesh, P(group.axis_names))
    return tuple(jax.device_put(micro_batch(sequence), placement) for sequence in sequences)


def make_step(
    graphdef: nnx.GraphDef, params: nnx.State, group: jax_ep.Group, sampling: Sampling
) -> Callable:
    """The compiled `step(params, batches, position) -> (batches, running)`.

    It reads the byte at `position` of every sequence, and writes the next one unless that is of the
    prompt. `running` bool [R]: whether a rank has sequences that go on. The batches are donated.
    """

    def per_device(params, batches, position):
        model = nnx.merge(graphdef, params)
        batches = take_turns(
            [decode(model, group, sampling, batch, position) for batch in batches])
        running = [jnp.any(position + 2 < batch.end) for batch in batches]
        return batches, jnp.any(jnp.stack(running))[None]

    sequences = P(group.axis_names)
    return jax.jit(
        jax.shard_map(
            per_device, mesh=group.mesh,
            in_specs=(nnx.get_partition_spec(params), sequences, P()),
            out_specs=(sequences, sequences)),
        donate_argnums=1)


def take_turns(micro_batches: Sequence[Generator]) -> tuple:
    """Runs generators in turn, from one yield to the next; returns what they return.

    They yield the operation that they have just started and get the one that was started last,
    None at first. All of them yield equally often.
    """
    results, started = [], None
    for micro_batch in micro_batches:
        next(micro_batch)
    while not results:
        for micro_batch in micro_batches:
            try:
                started = micro_batch.send(started)
            except StopIteration as end:
                results.append(end.value)
    return tuple(results)


def decode(
    model: Transformer, group: jax_ep.Group, sampling: Sampling, batch: MicroBatch,
    position: jax.Array,
) -> Generator:
    """One step of a micro-batch, on one device, for `take_turns`; returns the batch after it.

    Order is for XLA a matter of dependences alone. So whatever is done in a turn depends on
    `other`, which the other micro-batch started in its turn before: it is on its way meanwhile.
    """
    # The last byte of a sequence has nothing to follow it, so it is not computed.
    going_on = position + 1 < batch.end
    x = model.embed(batch.text[:, position].astype(jnp.int32))
    other = yield
    if other is not None:
        x = jax_ep.after(other, x)
    caches, experts = [], []
    for block, cache in zip(model.blocks, batch.caches):
        y, cache = block.attention.decode(block.attention_norm(x), cache, position)
        x += y
        tokens = block.moe_norm(x)
        topk_weights, topk_idx = jax_ep.route(
            tokens @ block.moe.router[...], group.num_topk, renormalize=True)
        topk_idx = jnp.where(going_on[:, None], topk_idx, -1)  # an ended sequence moves no row
        # Few tokens for each expert: padded to the same number, they are one batched product.
        pending = jax_ep.dispatch_start(
            group, tokens, topk_idx, topk_weights, layout="padded")
        other = yield pending
        rows, row_weights, handle = jax_ep.dispatch_done(pending, after=other)
        rows = jax_ep.swiglu(
            rows, handle.group_sizes, block.moe.gate_up[...], block.moe.down[...])
        pending = jax_ep.combine_start(rows, handle, row_weights)
        other = yield pending
        x += jax_ep.combine_done(pending, after=other)
        caches.append(cache)
        experts.append(topk_idx)

    scores = sampling.scores(model.head(model.norm(x)), batch.sequence, position)
    new = jnp.argmax(scores, axis=-1).astype(jnp.uint8)
    generating = going_on & (position + 1 >= batch.prompt_length)
    text = batch.text.at[:, position + 1].set(
        jnp.where(generating, new, batch.text[:, position + 1]))
    end = batch.end
    if sampling.stop is not None:
        end = jnp.where(generating & (new == sampling.stop), position + 2, end)
    return dataclasses.replace(
        batch, text=text, end=end, caches=tuple(caches),
        experts=batch.experts.at[:, position].set(jnp.stack(experts, axis=1)))
