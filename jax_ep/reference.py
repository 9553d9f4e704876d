"""The three operations in plain JAX and XLA collectives: the "xla" backend.

Runs on every platform that XLA has, and says in the fewest words what the native backends do; it
is not made for speed. The slot arithmetic mirrors csrc/core/slots.h. The functions take and return
what the primitives do (see primitives/) and run inside shard_map.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import quantized
from jax_ep.handle import HandleSpec
from jax_ep.varying import vary_like


def prepare(topk_idx: jax.Array, *, spec: HandleSpec) -> list[jax.Array]:
    """slots, row_source, row_topk_idx, recv_slots, group_sizes, expert_counts, num_rows,
    num_dropped."""
    group = spec.group
    num_ranks, num_experts, num_topk = group.num_ranks, group.num_experts, group.num_topk
    num_local_experts = group.num_local_experts
    num_tokens = topk_idx.shape[0]
    me = lax.axis_index(group.axis_names)

    # Every rank computes the plan of all ranks from everyone's indices, pair by pair in the order
    # (source rank, token, k). An unrouted pair gets the expert E, past the last.
    pairs = lax.all_gather(topk_idx, group.axis_names).reshape(-1)
    routed = (pairs >= 0) & (pairs < num_experts)
    expert = jnp.where(routed, pairs, num_experts)
    local_expert = expert % num_local_experts
    target_rank = expert // num_local_experts
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)[:-1]
    counts = counts.reshape(num_ranks, num_local_experts)

    if spec.layout == "rank":
        # The rows of a rank: the tokens with at least one pair there, in order.
        token_targets = target_rank.reshape(-1, num_topk)
        has_row = (token_targets[:, :, None] == jnp.arange(num_ranks)).any(axis=1)
        token_row = jnp.cumsum(has_row, axis=0, dtype=jnp.int32) - 1
        token_row = jnp.pad(token_row, ((0, 0), (0, 1)))  # for target_rank of unrouted pairs
        slot = jnp.take_along_axis(token_row, token_targets, axis=1).reshape(-1)
        kept = routed & (slot < spec.capacity)
        sizes = jnp.zeros(num_experts, jnp.int32)
        sizes = sizes.at[jnp.where(kept, expert, num_experts)].add(1, mode="drop")
        sizes = sizes.reshape(counts.shape)
        num_rows = jnp.minimum(has_row.sum(axis=0, dtype=jnp.int32), spec.capacity)
    else:
        # The position of a pair among its expert's: its place in a stable sort by expert.
        order = jnp.argsort(expert, stable=True)
        first = jnp.pad(jnp.cumsum(counts.reshape(-1)), (1, 0))
        place = jnp.zeros_like(expert).at[order].set(jnp.arange(expert.size, dtype=jnp.int32))
        position = place - first[expert]
        if spec.layout == "padded":
            kept = routed & (position < spec.capacity)
            slot = local_expert * spec.capacity + position
            sizes = jnp.minimum(counts, spec.capacity)
        else:
            aligned = -(-counts // spec.expert_alignment) * spec.expert_alignment
            ends = jnp.cumsum(aligned, axis=1)
            offsets = ends - aligned
            slot = offsets.reshape(-1).at[expert].get(mode="clip") + position
            kept = routed & (slot < spec.capacity)
            sizes = jnp.minimum(ends, spec.capacity) - jnp.minimum(offsets, spec.capacity)
        num_rows = sizes.sum(axis=1)

    # What this rank receives.
    mine = kept & (target_rank == me)
    pair = jnp.arange(pairs.size, dtype=jnp.int32)
    source_rank, token, k = _unravel(pair, num_tokens, num_topk)
    source = source_rank * group.max_tokens_per_rank + token
    if spec.layout != "rank":
        source = source * num_topk + k
    num_slots = _num_slots(spec)
    row = jnp.where(mine, slot, num_slots)
    row_source = jnp.full(num_slots, -1, jnp.int32).at[row].set(source, mode="drop")
    if spec.layout == "rank":
        row_topk_idx = jnp.full((num_slots, num_topk), -1, jnp.int32)
        row_topk_idx = row_topk_idx.at[row, k].set(local_expert, mode="drop")
    else:
        row_topk_idx = jnp.zeros((1, num_topk), jnp.int32)
    num_dropped = (routed & ~kept & (target_rank == me)).sum(dtype=jnp.int32)

    slots = jnp.where(kept, slot, -1).reshape((num_ranks,) + topk_idx.shape)
    recv_slots = jnp.where(mine, slot, -1).reshape(slots.shape)
    unused = group.max_tokens_per_rank - num_tokens
    results = [
        slots[me],
        row_source.reshape(spec.row_dims),
        row_topk_idx,
        jnp.pad(recv_slots, ((0, 0), (0, unused), (0, 0)), constant_values=-1),
        sizes[me],
        counts[me],
        num_rows[me],
        num_dropped,
    ]
    return [vary_like(x.astype(jnp.int32), topk_idx) for x in results]


def dispatch(
    topk_idx, slots, row_source, row_topk_idx, recv_slots, *operands, spec, has_weights, quantize
):
    """Gathers all tokens of all ranks, then takes the rows."""
    del slots, recv_slots
    leaves = list(operands)
    pair_weights = leaves.pop() if has_weights else None
    leaves = [
        part
        for leaf in leaves
        for part in (cast(leaf, quantize) if quantized.is_cast(leaf, quantize) else [leaf])
    ]
    group = spec.group
    num_tokens = topk_idx.shape[0]
    code = row_source.reshape(-1)
    token, k = code, None
    if spec.layout != "rank":
        token, k = code // group.num_topk, code % group.num_topk
    rank, token = token // group.max_tokens_per_rank, token % group.max_tokens_per_rank
    # The index in the gathered tokens; past their end, and so filled with zero, for no source.
    index = jnp.where(code >= 0, rank * num_tokens + token, group.num_ranks * num_tokens)

    def pull(leaf):
        if num_tokens == 0:  # XLA gathers nothing from nothing
            return vary_like(jnp.zeros(index.shape + leaf.shape[1:], _bits_dtype(leaf.dtype)), leaf)
        gathered = lax.all_gather(_to_bits(leaf), group.axis_names, tiled=True)
        return gathered.at[index].get(mode="fill", fill_value=0)

    rows = [
        _from_bits(pull(leaf).reshape(spec.row_dims + leaf.shape[1:]), leaf.dtype)
        for leaf in leaves
    ]
    if has_weights:
        weights = pull(pair_weights)
        if spec.layout == "rank":
            weights = jnp.where(row_topk_idx >= 0, weights, 0)
        else:
            weights = jnp.take_along_axis(weights, jnp.maximum(k, 0)[:, None], axis=1)
        rows.append(_from_bits(weights.reshape(spec.value_dims), pair_weights.dtype))
    return rows


def cast(x: jax.Array, quantize: str) -> list[jax.Array]:
    """The float8_e4m3fn values [..., H] of floats x, and their scales [..., ceil(H / 128)].

    Mirrors csrc/core/quantize.h, and says there why flushed subnormals change nothing.
    """
    *lines, num_columns = x.shape
    num_blocks = -(-num_columns // quantized.BLOCK)
    padding = [(0, 0)] * len(lines) + [(0, num_blocks * quantized.BLOCK - num_columns)]
    blocks = jnp.pad(x.astype(jnp.float32), padding).reshape(*lines, num_blocks, quantized.BLOCK)
    magnitude = _to_bits(blocks) & 0x7FFFFFFF
    amax = magnitude.max(axis=-1)
    is_nan = amax >= 0x7F800000
    amax = jnp.maximum(amax, 20 << 23)  # 2^-107
    if quantize == "fp8":
        # As integers, not as numbers that are moved: XLA must not drop a rounding.
        scale = _to_bits(_from_bits(amax, jnp.float32) * np.float32(1 / 448))
        scale = jnp.where(is_nan, 0x7FC00000, scale)
        inverse = _inverse(amax)
    else:
        biased = (amax - (8 << 23) + 0x1FFFFF) >> 23
        if quantize == "fp8_e8m0":
            scale = jnp.where(is_nan, 0xFF, biased).astype(jnp.uint8)
        else:
            scale = jnp.where(is_nan, 0x7FC00000, biased << 23)
        inverse = (254 - biased) << 23
    values = blocks * _from_bits(inverse, jnp.float32)[..., None]
    values = _to_bits(values.astype(jnp.float8_e4m3fn))
    values = jnp.where(is_nan[..., None], jnp.uint8(0x7F), values)
    values = values.reshape(*lines, num_blocks * quantized.BLOCK)[..., :num_columns]
    return [
        _from_bits(values, jnp.dtype(jnp.float8_e4m3fn)),
        _from_bits(scale, quantized.SCALE_DTYPES[quantize]),
    ]


def _inverse(amax):
    """448 / amax to nearest even, both float32 as bits: XLA's division is not exact on GPUs."""
    exponent, divisor = amax >> 23, amax & 0x7FFFFF | 0x800000
    # 448 is 0xE00000 * 2^-15. Long division to 24 bits and one more, which rounds: a quotient of
    # two 24-bit numbers is never half way between two others.
    small = (divisor > 0xE00000).astype(jnp.uint32)
    rest = jnp.uint32(0xE00000) << small

    def step(_, state):
        quotient, rest = state
        bit = (rest >= divisor).astype(jnp.uint32)
        return 2 * quotient + bit, 2 * (rest - bit * divisor)

    quotient, _ = lax.fori_loop(0, 25, step, (jnp.zeros_like(rest), rest))
    quotient = (quotient + 1) >> 1
    return ((262 - exponent - small) << 23) + quotient - 0x800000


def combine(topk_idx, slots, row_source, row_topk_idx, recv_slots, *operands, spec, values):
    """Every rank sums its rows for every token of every rank; the tokens' ranks sum the rest."""
    del slots, row_source, row_topk_idx
    group = spec.group
    num_tokens, num_topk = topk_idx.shape
    leaves = list(operands)
    pair_values = leaves.pop() if values != "none" else None

    slot = recv_slots[:, :num_tokens].reshape(-1, num_topk)  # of every rank's tokens
    mine = slot >= 0
    enters = mine
    if spec.layout == "rank":  # the pairs of a token here share a row, which enters once
        enters = mine & (jnp.cumsum(mine, axis=1) == 1)
    num_slots = _num_slots(spec)

    def exchange(x):
        """[R * T, ...] for the tokens of all ranks -> [R, T, ...] from all ranks."""
        x = x.reshape((group.num_ranks, num_tokens) + x.shape[1:])
        return lax.all_to_all(x, group.axis_names, split_axis=0, concat_axis=0)

    def take(flat, k, where):
        """flat[slot[:, k]] where `where`, else zero."""
        if num_slots == 0:  # XLA takes nothing from nothing
            return vary_like(jnp.zeros(slot.shape[:1] + flat.shape[1:], flat.dtype), flat)
        index = jnp.where(where[:, k], slot[:, k], len(flat))
        return flat.at[index].get(mode="fill", fill_value=0)

    results = []
    for leaf in leaves:
        dtype = leaf.dtype
        acc = accumulator(dtype)
        flat = leaf.reshape((num_slots,) + leaf.shape[len(spec.row_dims) :])
        partial = jnp.zeros((slot.shape[0],) + flat.shape[1:], acc)
        for k in range(num_topk):
            row = take(flat, k, enters).astype(acc)
            if values == "weights":
                weight = take(pair_values.reshape(-1).astype(acc), k, enters)
                row = row * weight.reshape(weight.shape + (1,) * (row.ndim - 1))
            partial = partial + row
        # As bits, so that XLA cannot drop the rounding between the two sums.
        partials = _from_bits(exchange(_to_bits(partial.astype(dtype))), dtype)
        total = jnp.zeros(partials.shape[1:], acc)
        for rank in range(group.num_ranks):
            total = total + partials[rank].astype(acc)
        results.append(total.astype(dtype))

    if values == "returned":
        flat = _to_bits(pair_values).reshape(num_slots, -1)  # [rows, K] in layout rank, else [rows, 1]
        columns = [
            take(flat[:, k if spec.layout == "rank" else 0], k, mine) for k in range(num_topk)
        ]
        returned = exchange(jnp.stack(columns, axis=1))
        # One rank at most has a value for a pair, the others zero bits.
        returned = jax.lax.reduce(returned, returned.dtype.type(0), lax.bitwise_or, (0,))
        results.append(_from_bits(returned, pair_values.dtype))
    return results


def _num_slots(spec: HandleSpec) -> int:
    return spec.capacity * (spec.group.num_local_experts if spec.layout == "padded" else 1)


def _unravel(pair, num_tokens, num_topk):
    """Index in [R, T, K] flattened -> rank, token, k."""
    return pair // num_topk // max(num_tokens, 1), pair // num_topk % max(num_tokens, 1), pair % num_topk


def accumulator(dtype) -> jnp.dtype:
    """The dtype that combine sums rows of `dtype` in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _bits_dtype(dtype):
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


def _to_bits(x):
    """Floats as unsigned integers, so that moving them keeps every bit."""
    bits = _bits_dtype(x.dtype)
    return x if bits == x.dtype else lax.bitcast_convert_type(x, bits)


def _from_bits(x, dtype):
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
