"""What Debian's bazel-bootstrap needs to work without a network.

Bazel's built-in WORKSPACE suffix downloads rules_cc, rules_java, rules_proto, platforms and the
coverage tools unless the workspace defines repositories of those names. Debian ships all but
rules_cc (its package does not load with its own Bazel) and the coverage tools; both are stubs here.
"""

_RULES_CC_DEFS = """
cc_library = native.cc_library
cc_binary = native.cc_binary
cc_test = native.cc_test
cc_import = native.cc_import
cc_proto_library = native.cc_proto_library
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_library = native.objc_library
"""

_COVERAGE_TOOLS_BUILD = """
filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])
filegroup(name = "lcov_merger", visibility = ["//visibility:public"])
"""

def _files_repository_impl(repository_ctx):
    for path, content in repository_ctx.attr.files.items():
        repository_ctx.file(path, content, executable = False)

_files_repository = repository_rule(
    implementation = _files_repository_impl,
    attrs = {"files": attr.string_dict(doc = "Path in the repository to content.")},
)

def _debian_repository_impl(repository_ctx):
    folder = repository_ctx.path(repository_ctx.attr.path)
    if not folder.exists:
        fail("%s is missing: apt-get install %s" % (folder, repository_ctx.attr.package))
    for entry in folder.readdir():
        repository_ctx.symlink(entry, entry.basename)

_debian_repository = repository_rule(
    implementation = _debian_repository_impl,
    attrs = {
        "path": attr.string(doc = "The folder that Debian's package installs."),
        "package": attr.string(doc = "The name of that package, for the error message."),
    },
)

def debian_bazel_repositories():
    """Defines the repositories for Debian's Bazel, and none for any other."""

    # Debian builds Bazel without a version label; every release has one.
    if native.bazel_version:
        return
    _files_repository(
        name = "rules_cc",
        files = {"cc/BUILD": "", "cc/defs.bzl": _RULES_CC_DEFS},
    )
    _files_repository(
        name = "remote_coverage_tools",
        files = {"BUILD": _COVERAGE_TOOLS_BUILD},
    )
    _debian_repository(
        name = "rules_java",
        package = "bazel-rules-java",
        path = "/usr/share/bazel/rules/java",
    )
    _debian_repository(
        name = "rules_proto",
        package = "bazel-rules-proto",
        path = "/usr/share/bazel/rules/proto",
    )
    _debian_repository(
        name = "platforms",
        package = "bazel-platforms",
        path = "/usr/share/bazel/platforms",
    )
