"""Copies the headers and sources that an extension module builds against into a folder.

Usage: python stage_python.py FOLDER, by the interpreter to build for. Prints its EXT_SUFFIX.
Copies, not links: pip deletes its build environments, and newer Bazels hide /tmp from actions.
"""

import importlib.util
import os
import pathlib
import shutil
import sys
import sysconfig


def package_dir(name: str) -> pathlib.Path:
    """Where a package is installed, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{sys.executable} has no package {name}: run `make setup`, or install what "
                 "pyproject.toml lists in build-system.requires")
    return pathlib.Path(spec.submodule_search_locations[0])


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    sys.path[:0] = filter(None, os.environ.get("JAX_EP_BUILD_PATH", "").split(os.pathsep))
    nanobind = package_dir("nanobind")
    python_include = pathlib.Path(sysconfig.get_path("include"))
    if not (python_include / "Python.h").exists():
        sys.exit(f"{sys.executable} has no headers: {python_include}/Python.h is missing "
                 "(Debian: apt-get install python3-dev)")
    for source, target in (
        (python_include, "python"),
        (package_dir("jaxlib") / "include" / "xla" / "ffi", "ffi/xla/ffi"),
        (nanobind / "include", "nanobind/include"),
        (nanobind / "src", "nanobind/src"),
        (nanobind / "ext", "nanobind/ext"),
    ):
        shutil.rmtree(out / target, ignore_errors=True)
        shutil.copytree(source, out / target, ignore=shutil.ignore_patterns("BUILD*"))
    print(sysconfig.get_config_var("EXT_SUFFIX"))


main()
