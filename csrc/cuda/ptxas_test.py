"""What nvcc made of the kernels: registers that spill, and for which GPUs there is code.

Reads ptxas's reports and the objects of //csrc/cuda:kernels, beside which Bazel starts it.
"""

import dataclasses
import pathlib
import re
import struct
import subprocess

import pytest

FOLDER = pathlib.Path(__file__).parent / "kernels"
ARCHITECTURES = {"sm_80", "sm_90a"}
PTX_ARCHITECTURE = 90


@dataclasses.dataclass(frozen=True)
class Compiled:
    """ptxas's figures of one kernel for one architecture."""

    kernel: str
    architecture: str
    stack_bytes: int
    spill_stores: int
    spill_loads: int

    @property
    def complaint(self) -> str | None:
        """What is wrong with it, or None."""
        name = f"{self.kernel} for {self.architecture}"
        if self.spill_stores or self.spill_loads:
            return (f"{name} spills registers: {self.spill_stores} bytes of stores, "
                    f"{self.spill_loads} bytes of loads")
        if self.stack_bytes:
            return f"{name} has {self.stack_bytes} bytes on the stack"
        return None


def read_report(text: str) -> list[Compiled]:
    """All kernels of a report; it has the functions that are not inlined, too."""
    pattern = re.compile(
        r"Compiling entry function '(?P<symbol>\w+)' for '(?P<architecture>\w+)'\n"
        r"ptxas info +: Function properties for (?P=symbol)\n"
        r" +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
    found = list(pattern.finditer(text))
    assert len(found) == text.count("Compiling entry function"), "ptxas has changed its report"
    names = demangle([match["symbol"] for match in found])
    return [Compiled(name, match["architecture"], *map(int, match.groups()[2:]))
            for name, match in zip(names, found)]


def demangle(symbols: list[str]) -> list[str]:
    """"DispatchKernel<VectorMover>": without namespaces and arguments."""
    if not symbols:
        return []
    text = subprocess.run(["c++filt", *symbols], check=True, text=True, capture_output=True).stdout
    return [re.sub(r"\w+::|\(anonymous namespace\)::|^void |(?<=>) (?=>)|\((?!anonymous).*", "",
                   line) for line in text.splitlines()]


def ptx_architectures(code: bytes) -> set[int]:
    """For which compute capabilities an object file has PTX, by the headers of its fat binary."""
    found = set()
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), code):
        header_size, size = struct.unpack_from("<HQ", code, match.start() + 6)
        at = match.start() + header_size
        end = at + size
        while at < end:
            kind, entry_header_size, entry_size = struct.unpack_from("<HxxIQ", code, at)
            if kind == 1:  # PTX; 2 is machine code
                found.add(struct.unpack_from("<I", code, at + 28)[0])
            at += entry_header_size + entry_size
    return found


def reports() -> dict[str, list[Compiled]]:
    """By source file."""
    return {path.name.removesuffix(".ptxas.txt"): read_report(path.read_text())
            for path in sorted(FOLDER.glob("*.ptxas.txt"))}


REPORTS = reports()


def test_all_kernels_are_here():
    kernels = {compiled.kernel.split("<")[0] for report in REPORTS.values() for compiled in report}
    assert kernels == {f"{name}Kernel" for name in ("Prepare", "Dispatch", "Combine",
                                                    "LowLatencyDispatch", "LowLatencyCombine")}


@pytest.mark.parametrize("source", REPORTS)
def test_no_spills(source):
    complaints = [compiled.complaint for compiled in REPORTS[source] if compiled.complaint]
    assert not complaints, "\n".join([source, *complaints])


@pytest.mark.parametrize("source", REPORTS)
def test_machine_code(source):
    architectures = {}
    for compiled in REPORTS[source]:
        architectures.setdefault(compiled.kernel, set()).add(compiled.architecture)
    assert architectures == dict.fromkeys(architectures, ARCHITECTURES)


@pytest.mark.parametrize("source", REPORTS)
def test_ptx_for_newer_gpus(source):
    assert ptx_architectures((FOLDER / f"{source}.pic.o").read_bytes()) == {PTX_ARCHITECTURE}


def sample(architecture="sm_90a", stack=0, stores=0, loads=0):
    symbol = "_ZN6jax_ep4cuda12_GLOBAL__N_114DispatchKernelINS0_11VectorMoverEEEvNS0_8MoveArgsE"
    return (f"ptxas info    : 0 bytes gmem\n"
            f"ptxas info    : Compiling entry function '{symbol}' for '{architecture}'\n"
            f"ptxas info    : Function properties for {symbol}\n"
            f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill "
            f"loads\n"
            f"ptxas info    : Function properties for _ZN6jax_ep4cuda9Operation4FailENS0_5PhaseE\n"
            f"    96 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n")


def test_reading_reports():
    text = sample() + sample(architecture="sm_80", stack=56, stores=12, loads=16)
    assert read_report(text) == [Compiled("DispatchKernel<VectorMover>", "sm_90a", 0, 0, 0),
                                 Compiled("DispatchKernel<VectorMover>", "sm_80", 56, 12, 16)]


@pytest.mark.parametrize("figures, complaint", [
    (dict(), None),
    (dict(stack=44, stores=4), "spills registers: 4 bytes of stores, 0 bytes of loads"),
    (dict(loads=4), "spills registers: 0 bytes of stores, 4 bytes of loads"),
    (dict(stack=48), "has 48 bytes on the stack"),
])
def test_complaints(figures, complaint):
    compiled, = read_report(sample(**figures))
    assert (compiled.complaint is None) == (complaint is None)
    if complaint:
        assert compiled.complaint.startswith(f"DispatchKernel<VectorMover> for sm_90a {complaint}")
