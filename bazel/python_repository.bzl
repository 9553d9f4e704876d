"""The repository @local_python: one Python interpreter and what extensions for it build against.

Targets: `:headers` (Python.h), `:ffi` (XLA's FFI headers, from jaxlib), `:nanobind`. Its `defs.bzl`
has `PYTHON` (the interpreter's absolute path), `EXT_SUFFIX` and `ENVIRONMENT`, a name for the set of
installed packages that changes when they do.

The environment variables, which `make setup` and the wheel build set by `--repo_env`:
  JAX_EP_PYTHON       the interpreter; default: python3 on the PATH
  JAX_EP_BUILD_PATH   folders to look for jaxlib and nanobind in before the interpreter's own
  JAX_EP_ENVIRONMENT  see ENVIRONMENT
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["python/**"]),
    includes = ["python"],
)

cc_library(
    name = "ffi",
    hdrs = glob(["ffi/**"]),
    includes = ["ffi"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**"]),
    copts = [
        "-Os",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-w",
    ],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
    ],
    linkstatic = True,
    local_defines = ["NB_COMPACT_ASSERTIONS"],
    textual_hdrs = glob([
        "nanobind/ext/**",
        "nanobind/src/**",
    ]),
    deps = [":headers"],
)
"""

_DEFS = """
PYTHON = "{python}"
EXT_SUFFIX = "{ext_suffix}"
ENVIRONMENT = "{environment}"
"""

def _python_repository_impl(repository_ctx):
    environ = repository_ctx.os.environ
    python = environ.get("JAX_EP_PYTHON") or repository_ctx.which("python3")
    if not python:
        fail("no python3 on the PATH: run `make setup`, or set JAX_EP_PYTHON")
    stage = repository_ctx.path(Label("//bazel:stage_python.py"))
    result = repository_ctx.execute([python, stage, "."])
    if result.return_code:
        fail("%s cannot build extensions:\n%s" % (python, result.stderr))
    repository_ctx.file("BUILD", _BUILD, executable = False)
    repository_ctx.file("defs.bzl", _DEFS.format(
        python = python,
        ext_suffix = result.stdout.strip(),
        environment = environ.get("JAX_EP_ENVIRONMENT", ""),
    ), executable = False)

python_repository = repository_rule(
    implementation = _python_repository_impl,
    environ = ["JAX_EP_PYTHON", "JAX_EP_BUILD_PATH", "JAX_EP_ENVIRONMENT"],
    local = True,
)
