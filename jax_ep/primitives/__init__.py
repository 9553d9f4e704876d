"""The three operations as JAX primitives, one file each, and what they share."""
