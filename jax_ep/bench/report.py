"""Results as they come: lines on stdout, and a JSON file that is whole after every one of them."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jax_ep
from jax_ep.bench.measure import Times, everyone
from jax_ep.bench.steps import Step

_COLUMNS = ("device", "max", "in a row", "single")


class Report:
    """Collects results over the processes; the first one prints and writes.

    Args:
      devices: of the ranks, in their order.
      fields: of the run, for the JSON file.
      headline: what to print first.
      json_file: where to, or None.
    """

    def __init__(self, devices: Sequence[jax.Device], fields: dict[str, Any], headline: str,
                 json_file: str | None):
        self._gpus = [device.local_hardware_id for device in devices
                      if device.process_index == jax.process_index()]
        self._explained = False
        self._file = json_file if jax.process_index() == 0 else None
        self._document = environment() | fields | {"results": []}
        self.say(headline)

    def say(self, text: str) -> None:
        """Prints a line, in the first process."""
        if jax.process_index() == 0:
            print(text, flush=True)

    def section(self, title: str) -> None:
        """Begins a table."""
        self.say(f"\n{title}\n{'microseconds':<28}" + "".join(f"{c:>10}" for c in _COLUMNS)
                 + f"{'link GB/s':>11}{'rows GB/s':>11}{'scratch MB':>12}")

    def add(self, step: Step, times: Times, **labels: Any) -> dict[str, Any]:
        """Adds one step's times: the first rank's, and the most of all ranks.

        Every process calls this, at the same point. Returns the result as the JSON file has it:
        "us" is the time that rates are taken over.
        """
        result = labels | {"step": step.name} | self.collect(times)
        us = result["us"]
        result |= {
            "row_bytes": step.row_bytes, "row_gb_per_s": step.row_bytes / us / 1e3,
            "link_bytes": step.link_bytes, "link_gb_per_s": step.link_bytes / us / 1e3,
            "temp_bytes": step.temp_bytes,
        }
        self.record(result)
        self.say(_line(result))
        if result["in_a_row_us"] is not None and result["device_us"] is None:
            self.explain('rates are over "in a row"')
        return result

    def collect(self, times: Times) -> dict[str, Any]:
        """The times of all processes, which all call this, as the JSON file has them."""
        processes = everyone({"single": times.single, "in_a_row": times.in_a_row})
        single = max(process["single"] for process in processes)
        in_a_row = None if times.in_a_row is None else max(p["in_a_row"] for p in processes)
        device = self.collect_device(times.device)
        return {"us": device["device_us_max"] or in_a_row or single, **device,
                "in_a_row_us": in_a_row, "single_us": single}

    def collect_device(self, times: dict[int, float]) -> dict[str, float | None]:
        """Of device times alone; None where not all GPUs have any."""
        mine = [times.get(gpu) for gpu in self._gpus]
        ranks = [us for process in everyone(mine) for us in process]
        traced = None not in ranks
        return {"device_us": ranks[0] if traced else None,
                "device_us_max": max(ranks) if traced else None}

    def explain(self, consequence: str) -> None:
        """Says once what follows from a GPU's lack of a profile."""
        if not self._explained:
            self._explained = True
            self.say(f"  (a GPU has no such kernels in its profile: {consequence})")

    def record(self, result: dict[str, Any]) -> None:
        """Puts a result into the JSON file."""
        self._document["results"].append(result)
        if self._file is None:
            return
        partial = f"{self._file}.partial"
        with open(partial, "w") as file:
            json.dump(self._document, file, indent=1)
        os.replace(partial, self._file)


def _line(result: dict[str, Any]) -> str:
    times = (result["device_us"], result["device_us_max"], result["in_a_row_us"],
             result["single_us"])
    rates = (result["link_gb_per_s"], result["row_gb_per_s"])
    scratch = result["temp_bytes"]
    return (f"{result['step']:<28}" + "".join(f"{'-' if t is None else f'{t:.0f}':>10}"
                                              for t in times)
            + "".join(f"{f'{rate:.1f}' if rate else '-':>11}" for rate in rates)
            + f"{'-' if scratch is None else f'{scratch / 1e6:.1f}':>12}")


def environment() -> dict[str, Any]:
    """Date, hardware, versions, and the commit if this is a git checkout."""
    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "devices": [device.device_kind for device in devices],
        "processes": jax.process_count(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "platform_version": devices[0].client.platform_version,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "jax_ep": jax_ep.__version__,
        "commit": _commit(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _commit() -> str | None:
    """Of the checkout that this file is in, with "+" where it has changes; None without git."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, check=True,
                              capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--short", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None
