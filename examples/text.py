"""Real text without a download: the sources of Python's standard library, byte by byte."""

import pathlib
import sysconfig

import numpy as np

# Every so many files, one is held out.
_HELD_OUT_EVERY = 20


def load(folder: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all .py files below `folder` (default: the standard library).

    Returns (training text, held-out text), uint8. The files are taken in sorted order and go to one
    part or the other whole, so that the split is the same on every run.
    """
    root = pathlib.Path(folder or sysconfig.get_path("stdlib"))
    files = sorted(
        path.relative_to(root) for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.parts)
    )
    contents = [(root / file).read_bytes() for file in files]
    held_out = contents[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    del contents[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    if not held_out:
        raise ValueError(f"{root} has {len(files)} .py files, fewer than {_HELD_OUT_EVERY}")
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in (contents, held_out))


def sample(text: np.ndarray, batch: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
    """`batch` random pieces of length + 1 bytes; the same ones for the same seed."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, batch)
    return text[starts[:, None] + np.arange(length + 1)]
