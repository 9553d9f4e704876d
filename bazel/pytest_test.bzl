"""`pytest_test`: one pytest file as one Bazel test."""

load("@local_python//:defs.bzl", "ENVIRONMENT", "PYTHON")

# Bazel starts it in the runfiles tree, where the sources and the native modules lie side by side.
_LAUNCHER = """#!/bin/sh
# Installed packages: {environment}
export PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1
exec '{python}' -m pytest -p no:cacheprovider ${{XML_OUTPUT_FILE:+--junitxml="$XML_OUTPUT_FILE"}} \\
    '{path}' "$@"
"""

def _pytest_test_impl(ctx):
    launcher = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(launcher, _LAUNCHER.format(
        environment = ENVIRONMENT,
        path = ctx.file.src.short_path,
        python = PYTHON,
    ), is_executable = True)
    runfiles = ctx.runfiles(files = [ctx.file.src] + ctx.files.data)
    for target in ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = launcher, runfiles = runfiles)]

_pytest_test = rule(
    implementation = _pytest_test_impl,
    attrs = {
        "src": attr.label(allow_single_file = [".py"], mandatory = True),
        "data": attr.label_list(allow_files = True),
    },
    test = True,
)

def pytest_test(name, src, data = [], tags = [], **kwargs):
    """Runs a file with @local_python's interpreter and installed packages.

    Args:
      name: the target's name.
      src: the test file.
      data: what it imports and reads.
      tags: tags, as of any test.
      **kwargs: size, timeout, args, ...
    """
    _pytest_test(
        name = name,
        src = src,
        data = data,
        # The interpreter and its packages lie outside of any sandbox.
        tags = tags + ["local"],
        **kwargs
    )
