"""Exchange between the processes of a group, before there is any communication of its own."""

import json
import time

# JAX's key-value store has no public name; it is what jax.distributed.initialize() connects.
from jax._src import distributed


def exchange(key: str, value: dict, process: int, processes: list[int], timeout_s: float) -> list[dict]:
    """Gives every process the `value` of each, in the order of `processes`.

    Args:
      key: names this exchange; equal on all processes, and new every time.
      value: this process's JSON-serialisable contribution.
      process: this process's index.
      processes: the indices of all that take part.
      timeout_s: how long to wait for all of them.

    Raises:
      RuntimeError: jax.distributed is not initialised, or a process did not come; it is named.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"a Group over processes {processes} needs jax.distributed.initialize() first"
        )
    client.key_value_set(f"jax_ep/{key}/{process}", json.dumps(value))
    deadline = time.monotonic() + timeout_s
    values = []
    for other in processes:
        try:
            remaining_ms = max(1, int((deadline - time.monotonic()) * 1000))
            text = client.blocking_key_value_get(f"jax_ep/{key}/{other}", remaining_ms)
        except Exception as error:
            raise RuntimeError(
                f"jax_ep {key}: process {process} waited {timeout_s:g} s in vain for process "
                f"{other} of {processes}"
            ) from error
        values.append(json.loads(text))
    return values
