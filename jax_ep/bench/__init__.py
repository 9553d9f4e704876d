"""Benchmarks of dispatch and combine: `python -m jax_ep.bench --help`."""
