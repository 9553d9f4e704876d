"""Python extension modules, and the flags for the project's own C++."""

load("@local_python//:defs.bzl", "EXT_SUFFIX")

# No -march: the baseline instruction set; code that wants more picks at run time.
COPTS = [
    "-O3",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]

def native_module(name, deps):
    """Links libraries into an importable extension module.

    Args:
      name: the module's name; the file is `name` + the Python's EXT_SUFFIX, in this package.
      deps: cc_libraries, one of which defines the module (NB_MODULE).
    """
    native.cc_binary(
        name = name + EXT_SUFFIX,
        linkopts = ["-Wl,--gc-sections"],
        linkshared = True,
        linkstatic = True,
        deps = deps,
    )
    native.alias(
        name = name,
        actual = name + EXT_SUFFIX,
    )
