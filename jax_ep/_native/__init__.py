"""The native modules that Bazel builds: `_cpu`, where it was built."""
