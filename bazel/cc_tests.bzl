"""`cc_tests`: one test per C++ test file of a package."""

load("//bazel:native_module.bzl", "COPTS")

def cc_tests(srcs, deps):
    """Defines a cc_test for each file, named like it.

    Args:
      srcs: files with a `main`, each a test by itself; usually a glob of *_test.cc.
      deps: what they test.
    """
    for source in srcs:
        native.cc_test(
            name = source[:-len(".cc")],
            size = "small",
            srcs = [source],
            copts = COPTS,
            linkstatic = True,
            deps = deps + ["//csrc/testing:check"],
        )
