"""`cuda_objects`: compiles CUDA sources with nvcc to objects that a cc_library takes as srcs.

`cuda_tests`: one test per CUDA test file of a package.
"""

load("@local_cuda//:defs.bzl", "CUDA_VERSION", "NVCC", "if_cuda")

# A100 and H100/H200 get machine code, whatever is newer gets PTX.
_ARCHITECTURES = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_90,code=compute_90",
]

_FLAGS = [
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
] + ["-gencode=" + arch for arch in _ARCHITECTURES]

def _cuda_objects_impl(ctx):
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context
    args = ctx.actions.args()
    args.add_all(_FLAGS + ctx.attr.copts)
    args.add_all(context.defines, before_each = "-D")
    args.add_all(context.quote_includes, before_each = "-I")
    args.add_all(context.includes, before_each = "-I")
    args.add_all(context.system_includes, before_each = "-isystem")
    objects = []
    reports = []
    for source in ctx.files.srcs:
        stem = "%s/%s" % (ctx.label.name, source.basename)
        compiled = ctx.actions.declare_file(stem + ".pic.o")
        report = ctx.actions.declare_file(stem + ".ptxas.txt")
        ctx.actions.run_shell(
            # CUDA_VERSION is in the command so that a new toolkit rebuilds.
            command = ": '{version}'; \"$@\" > {report} 2>&1 || {{ cat {report} >&2; exit 1; }}; {{ grep -i warning {report} >&2 || true; }}".format(
                report = report.path,
                version = CUDA_VERSION,
            ),
            arguments = [NVCC, args, "-c", source.path, "-o", compiled.path],
            inputs = depset([source], transitive = [context.headers]),
            outputs = [compiled, report],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % source.short_path,
            use_default_shell_env = True,
        )
        objects.append(compiled)
        reports.append(report)
    return [
        DefaultInfo(files = depset(objects)),
        OutputGroupInfo(ptxas = depset(reports)),
    ]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "copts": attr.string_list(),
    },
    doc = """One object per source, for every architecture above.

The output group `ptxas` has what ptxas says of each kernel's registers, spills and shared memory.
""",
)

def cuda_objects(name, srcs, deps = [], copts = [], **kwargs):
    """Defines the rule where there is CUDA and nothing elsewhere; name it inside `if_cuda` only.

    Args:
      name: the target's name.
      srcs: .cu files.
      deps: cc_libraries whose headers the sources include.
      copts: more flags for nvcc.
      **kwargs: common attributes.
    """
    if if_cuda([True]):
        _cuda_objects(name = name, srcs = srcs, deps = deps, copts = copts, **kwargs)

def cuda_tests(srcs, deps):
    """Defines a cc_test for each file where there is CUDA; it is built and run by name only.

    Args:
      srcs: .cu files with a `main`, each a test by itself that needs a GPU.
      deps: what they test.
    """
    for source in if_cuda(srcs):
        name = source[:-len(".cu")]
        cuda_objects(
            name = name + "_objects",
            testonly = True,
            srcs = [source],
            deps = deps,
        )
        native.cc_test(
            name = name,
            srcs = [name + "_objects"],
            linkstatic = True,
            tags = ["manual"],
            deps = deps,
        )
