"""Router gates and the statistics that keep experts balanced.

Everything here is plain jnp on the local tokens: it runs inside or outside `shard_map`, on every
platform. All arithmetic is float32 whatever the dtype of the logits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

AxisName = str | Sequence[str]

_SCORES = ("softmax", "sigmoid")


def route(
    router_logits: jax.Array,
    num_topk: int,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    scaling_factor: float = 1.0,
    correction_bias: jax.Array | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses `num_topk` experts per token and their combine weights.

    Experts are selected by score + correction_bias; the weights are the scores without the bias.
    Between equal scores the expert of lower index wins. With `num_groups`, the experts are split
    into that many groups of neighbours, a group is worth the sum of its two best biased scores,
    and only experts of the best `topk_groups` groups can be selected (DeepSeek-V3).

    Gradients flow to the logits through the weights alone, never to `correction_bias`.

    Args:
      router_logits: float [T, E].
      num_topk: experts per token, 1 <= num_topk <= E.
      score: "softmax" over the experts, or "sigmoid" of each logit.
      renormalize: divide each token's weights by their sum.
      scaling_factor: multiplies the weights, after renormalisation.
      correction_bias: float [E] or None.
      num_groups: divides E; None or 1 means no group limit.
      topk_groups: 1 <= topk_groups <= num_groups; required with num_groups > 1.

    Returns:
      (topk_weights float32 [T, num_topk], topk_idx int32 [T, num_topk]), best expert first.

    Raises:
      TypeError: router_logits or correction_bias is not of a float dtype.
      ValueError: a shape or an option is not as above.
    """
    num_experts = _check_logits(router_logits)
    if not 1 <= num_topk <= num_experts:
        raise ValueError(f"num_topk must be in [1, {num_experts}] (router_logits has shape "
                         f"{router_logits.shape}), got {num_topk}")
    group_size = _check_groups(num_experts, num_topk, num_groups, topk_groups)

    scores = _scores(router_logits, score)
    biased = jax.lax.stop_gradient(scores)
    if correction_bias is not None:
        biased += jax.lax.stop_gradient(_check_bias(correction_bias, num_experts))
    if group_size < num_experts:
        biased = _mask_groups(biased, group_size, topk_groups)
    _, topk_idx = jax.lax.top_k(biased, num_topk)

    weights = jnp.take_along_axis(scores, topk_idx, axis=-1)
    if renormalize:
        # The tiny term keeps a token whose chosen scores all underflow at weight 0 instead of NaN.
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return weights * scaling_factor, topk_idx.astype(jnp.int32)


def load_balance_loss(
    router_logits: jax.Array,
    topk_idx: jax.Array,
    *,
    score: str = "softmax",
    axis_name: AxisName | None = None,
) -> jax.Array:
    """The auxiliary loss E * sum_e f_e * P_e of GShard, Switch Transformer and ST-MoE.

    f_e is expert e's share of all routed (token, k) pairs, without gradient, and P_e the mean over
    tokens of its score, each token's scores normalised to sum to one. Perfect balance gives 1.

    Args:
      router_logits: float [T, E].
      topk_idx: int [T, K]; entries of -1 (not routed) are not counted.
      score: the gate's score function, "softmax" or "sigmoid".
      axis_name: mesh axis or axes over which f and P are taken, so that the loss is that of the
        global batch.

    Returns:
      float32 [], 0 if there are no tokens.

    Raises:
      TypeError, ValueError: wrong dtype, shape or score.
    """
    num_experts = _check_logits(router_logits)
    if topk_idx.ndim != 2 or topk_idx.shape[0] != router_logits.shape[0]:
        raise ValueError(f"topk_idx must have shape [T, K] with T = {router_logits.shape[0]} as in "
                         f"router_logits, got {topk_idx.shape}")
    scores = _scores(router_logits, score)
    if score == "sigmoid":
        scores /= jnp.sum(scores, axis=-1, keepdims=True) + 1e-20
    score_sums = _psum(jnp.sum(scores, axis=0), axis_name)
    num_tokens = _psum(jnp.float32(scores.shape[0]), axis_name)
    load = expert_load(topk_idx, num_experts, axis_name=axis_name).astype(jnp.float32)

    fraction = load / jnp.maximum(jnp.sum(load), 1.0)
    mean_score = score_sums / jnp.maximum(num_tokens, 1.0)
    return num_experts * jnp.sum(fraction * mean_score)


def expert_load(
    topk_idx: jax.Array, num_experts: int, *, axis_name: AxisName | None = None
) -> jax.Array:
    """Counts the (token, k) pairs routed to each expert.

    Args:
      topk_idx: int [..., K]; values outside [0, num_experts), such as -1, are not counted.
      num_experts: E.
      axis_name: mesh axis or axes over which to sum.

    Returns:
      int32 [E].

    Raises:
      TypeError: topk_idx is not of an integer dtype.
    """
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(f"topk_idx must be of an integer dtype, got {topk_idx.dtype}")
    hits = topk_idx.reshape(-1, 1) == jnp.arange(num_experts, dtype=topk_idx.dtype)
    return _psum(jnp.sum(hits, axis=0, dtype=jnp.int32), axis_name)


def update_correction_bias(
    correction_bias: jax.Array, load: jax.Array, *, rate: float = 1e-3
) -> jax.Array:
    """One step of auxiliary-loss-free balancing (Wang et al., 2024).

    The bias of an expert below the mean load rises by `rate`, that of one above falls by it, and
    that of one exactly at the mean stays.

    Args:
      correction_bias: float [E].
      load: int or float [E], from `expert_load` over the global batch.
      rate: the update speed.

    Returns:
      float32 [E].

    Raises:
      ValueError: the shapes differ.
    """
    if correction_bias.ndim != 1 or load.shape != correction_bias.shape:
        raise ValueError(f"correction_bias and load must both have shape [E], got "
                         f"{correction_bias.shape} and {load.shape}")
    load = load.astype(jnp.float32)
    error = jnp.mean(load) - load
    return correction_bias.astype(jnp.float32) + rate * jnp.sign(error)


def _scores(router_logits: jax.Array, score: str) -> jax.Array:
    if score not in _SCORES:
        raise ValueError(f"score must be one of {_SCORES}, got {score!r}")
    logits = router_logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)


def _mask_groups(biased: jax.Array, group_size: int, topk_groups: int) -> jax.Array:
    """Sets the scores [T, E] outside each token's best `topk_groups` groups to -inf."""
    num_tokens, num_experts = biased.shape
    num_groups = num_experts // group_size
    grouped = biased.reshape(num_tokens, num_groups, group_size)
    best, _ = jax.lax.top_k(grouped, min(2, group_size))
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), topk_groups)
    keep = jnp.any(chosen[:, :, None] == jnp.arange(num_groups), axis=1)
    # -inf and not 0: a correction bias can make every biased score of a kept group negative.
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)


def _psum(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    if axis_name is None:
        return x
    return jax.lax.psum(x, axis_name if isinstance(axis_name, str) else tuple(axis_name))


def _check_logits(router_logits: jax.Array) -> int:
    if not jnp.issubdtype(router_logits.dtype, jnp.floating):
        raise TypeError(f"router_logits must be of a float dtype, got {router_logits.dtype}")
    if router_logits.ndim != 2 or router_logits.shape[1] == 0:
        raise ValueError("router_logits must have shape [T, E] with E >= 1, got "
                         f"{router_logits.shape}")
    return router_logits.shape[1]


def _check_bias(correction_bias: jax.Array, num_experts: int) -> jax.Array:
    if not jnp.issubdtype(correction_bias.dtype, jnp.floating):
        raise TypeError(f"correction_bias must be of a float dtype, got {correction_bias.dtype}")
    if correction_bias.shape != (num_experts,):
        raise ValueError(f"correction_bias must have shape ({num_experts},), one value per expert, "
                         f"got {correction_bias.shape}")
    return correction_bias.astype(jnp.float32)


def _check_groups(
    num_experts: int, num_topk: int, num_groups: int | None, topk_groups: int | None
) -> int:
    """Returns the experts per group; num_experts when there is no group limit."""
    if num_groups is None:
        if topk_groups is not None:
            raise ValueError(f"topk_groups={topk_groups} needs num_groups")
        return num_experts
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups must divide the {num_experts} experts, got {num_groups}")
    if num_groups == 1:
        topk_groups = 1 if topk_groups is None else topk_groups
    if topk_groups is None or not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups must be in [1, num_groups = {num_groups}], got "
                         f"{topk_groups}")
    group_size = num_experts // num_groups
    if num_topk > topk_groups * group_size:
        raise ValueError(f"num_topk = {num_topk} is more than the {topk_groups * group_size} "
                         f"experts that topk_groups = {topk_groups} groups of {group_size} hold")
    return group_size
