"""Set-up of all tests: eight CPU devices unless the environment says otherwise.

The same tests run on GPUs with JAX_PLATFORMS=cuda; those that need more devices than there are
skip themselves.
"""

import importlib
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "jax_ep", max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("jax_ep")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


@pytest.fixture(params=["native", pytest.param("xla", marks=pytest.mark.slow)])
def backend(request):
    """The platform's native backend, and in the full suite the reference, slow to compile."""
    return request.param


@pytest.fixture(params=["native", "xla"])
def both_backends(request):
    """For what is quick with the reference too."""
    return request.param


@pytest.fixture
def example_module(monkeypatch):
    """Imports a module of the examples as their scripts see it."""
    folder = pathlib.Path(__file__).resolve().parents[1] / "examples"
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
