"""Saving and restoring the training state with orbax."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one training run, the newest two of which are kept.

    Each has the items "params" and "optimizer" (pytrees of arrays) and "info" (JSON), so that the
    parameters can be restored alone.
    """

    def __init__(self, folder: str):
        self._manager = ocp.CheckpointManager(
            pathlib.Path(folder).absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, params: Any, optimizer: Any, info: dict) -> None:
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                optimizer=ocp.args.StandardSave(optimizer),
                info=ocp.args.JsonSave(info),
            ),
        )

    def info(self) -> dict:
        """The newest checkpoint's JSON."""
        return self._restore(info=ocp.args.JsonRestore())["info"]

    def params(self, like: Any) -> Any:
        """The newest parameters, with the structure, shapes and shardings of `like`."""
        return self._restore(params=_standard(like))["params"]

    def optimizer(self, like: Any) -> Any:
        """The newest optimiser state, with the structure, shapes and shardings of `like`."""
        return self._restore(optimizer=_standard(like))["optimizer"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _restore(self, **items):
        return self._manager.restore(self.latest_step(), args=ocp.args.Composite(**items))


def _standard(like):
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    return ocp.args.StandardRestore(abstract)
