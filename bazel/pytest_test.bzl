"""`pytest_test`: one pytest file as one Bazel test."""

load("@local_python//:defs.bzl", "ENVIRONMENT", "PYTHON")

# Bazel starts it in the runfiles tree, where the sources and the native modules lie side by side.
# JAX_EP_INSTALLED, where set, is a Python that has jax_ep installed: the test is then of that.
_LAUNCHER = """#!/bin/sh
# Installed packages: {environment}
export PYTHONDONTWRITEBYTECODE=1
if [ -n "$JAX_EP_INSTALLED" ]; then
  python=$JAX_EP_INSTALLED
  export PYTHONSAFEPATH=1
else
  python='{python}'
  export PYTHONPATH="$PWD"
fi
"$python" -m pytest -p no:cacheprovider ${{XML_OUTPUT_FILE:+--junitxml="$XML_OUTPUT_FILE"}} \\
    '{path}' "$@"
status=$?
# A selection of tests may leave none of this file.
if [ $status -eq 5 ] && [ $# -gt 0 ]; then status=0; fi
exit $status
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
