"""Expert parallelism for JAX: dispatch and combine as primitives.

A Mixture-of-Experts layer sends each token to a few experts that live on
different devices. `dispatch` moves the tokens to their experts and `combine`
brings the experts' outputs back and sums them; each is the other's transpose.

See `jax_ep.Group` to begin, and docs/semantics.md for what every row means.
"""

from jax_ep.group import Group
from jax_ep.handle import Handle
from jax_ep.moe import moe, swiglu
from jax_ep.primitives.combine import combine
from jax_ep.primitives.dispatch import dispatch
from jax_ep.primitives.prepare import prepare
from jax_ep.primitives.prepare_and_dispatch import prepare_and_dispatch
from jax_ep.primitives.split import (
    CombinePending,
    DispatchPending,
    after,
    combine_done,
    combine_start,
    dispatch_done,
    dispatch_start,
)
from jax_ep.quantized import Quantized
from jax_ep.routing import expert_load, load_balance_loss, route, update_correction_bias

__version__ = "0.1.0"

__all__ = [
    "CombinePending",
    "DispatchPending",
    "Group",
    "Handle",
    "Quantized",
    "after",
    "combine",
    "combine_done",
    "combine_start",
    "dispatch",
    "dispatch_done",
    "dispatch_start",
    "expert_load",
    "load_balance_loss",
    "moe",
    "prepare",
    "prepare_and_dispatch",
    "route",
    "swiglu",
    "update_correction_bias",
]
