"""The repository @local_cuda: the CUDA toolkit whose nvcc is on the PATH, or a note that there is none.

Its `defs.bzl` has `NVCC` (absolute path; "" without CUDA), `CUDA_VERSION` (what nvcc prints) and
`if_cuda(a, b = [])`. With CUDA there are the targets `:headers` and `:cudart_static`.
CUDA_HOME, where set, comes before the PATH.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include", "include/cccl"],
)

cc_library(
    name = "cudart_static",
    srcs = ["libcudart_static.a"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    deps = [":headers"],
)
"""

_DEFS = """
NVCC = {nvcc}
CUDA_VERSION = {version}

def if_cuda(with_cuda, without_cuda = []):
    return {choice}
"""

def _find_nvcc(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME")
    if not home:
        return repository_ctx.which("nvcc")
    nvcc = repository_ctx.path(home + "/bin/nvcc")
    if not nvcc.exists:
        fail("CUDA_HOME is %s, but %s does not exist" % (home, nvcc))
    return nvcc

def _toolkit_root(repository_ctx, nvcc):
    # The nvcc on the PATH may be a link or a script; the real one says where it lives.
    result = repository_ctx.execute([nvcc, "--dryrun", "-x", "cu", "-E", "/dev/null"])
    for line in result.stderr.splitlines():
        if line.startswith("#$ TOP="):
            return line[len("#$ TOP="):].strip()
    return None

def _toolkit(repository_ctx):
    """Returns the paths of nvcc, the headers and the static runtime, or None."""
    found = _find_nvcc(repository_ctx)
    if not found:
        return None
    root = _toolkit_root(repository_ctx, found)
    if not root:
        print("no CUDA targets: %s --dryrun names no toolkit" % found)
        return None
    parts = [repository_ctx.path(root + part) for part in [
        "/bin/nvcc",
        "/include",
        "/lib64/libcudart_static.a",
    ]]
    for part in parts:
        if not part.exists:
            print("no CUDA targets: %s does not exist" % part)
            return None
    return parts

def _cuda_repository_impl(repository_ctx):
    toolkit = _toolkit(repository_ctx)
    nvcc = ""
    version = ""
    if toolkit:
        nvcc = str(toolkit[0])
        version = repository_ctx.execute([nvcc, "--version"]).stdout.strip().splitlines()[-1]
        repository_ctx.symlink(toolkit[1], "include")
        repository_ctx.symlink(toolkit[2], "libcudart_static.a")
    repository_ctx.file("BUILD", _BUILD if toolkit else "", executable = False)
    repository_ctx.file("defs.bzl", _DEFS.format(
        nvcc = repr(nvcc),
        version = repr(version),
        choice = "with_cuda" if toolkit else "without_cuda",
    ), executable = False)

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
