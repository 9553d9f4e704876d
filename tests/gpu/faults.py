"""What the processes of test_faults.py run."""

import functools
import os
import re
import signal
import time

import jax
import jax_ep
import numpy as np
from jax.sharding import Mesh

from jax_ep.testing import cases, run
from jax_ep.testing.cases import Case

TIMEOUT_S = 2.0


def killed_process():
    """The last process dies; the others learn it in time, and can go on.

    One finds out which rank is gone; the others may be told by it before they do.
    """
    case = Case(num_ranks=len(jax.devices()))
    mesh = Mesh(np.array(jax.devices()), (run.AXIS,))
    group = jax_ep.Group(mesh, run.AXIS, num_experts=case.num_experts, num_topk=case.num_topk,
                         max_tokens_per_rank=case.max_tokens_per_rank, max_row_bytes=64,
                         backend="cuda", timeout_s=TIMEOUT_S)
    program = jax.jit(run.per_rank(group, functools.partial(run.prepare, group, case)))
    topk_idx = cases.routing("uniform", case)
    jax.block_until_ready(program(topk_idx))
    last = jax.process_count() - 1
    if jax.process_index() == last:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    start = time.monotonic()
    jax.block_until_ready(program(topk_idx))
    elapsed = time.monotonic() - start
    assert elapsed < TIMEOUT_S + 1, elapsed
    text = ""
    try:
        group.check()
    except RuntimeError as error:
        text = str(error)
    expected = (f"jax_ep prepare .* (in vain for rank {case.num_ranks - 1}'s data|"
                "stopped because rank [0-9]+ had failed)")
    assert re.search(expected, text), text
    print("SURVIVED:", text, flush=True)
    if jax.process_index() == 0:
        time.sleep(1)  # the others die with the coordinator
    os._exit(0)  # jax.distributed.shutdown would wait for the dead one
