"""The hatchling hook that puts the native modules into wheels, built by Bazel.

It is the one place that knows how: `pip install .`, `pip wheel .` and the editable install of
`make setup` all come through here. A module is built for the interpreter that runs the hook, against
the jaxlib headers and the nanobind that this interpreter finds.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_MODULES_LIST = "jax_ep/_native/modules.txt"


def find_bazel() -> str:
    """The Bazel to use: $BAZEL, or bazel or bazelisk from the PATH."""
    bazel = os.environ.get("BAZEL") or shutil.which("bazel") or shutil.which("bazelisk")
    if bazel is None:
        raise RuntimeError(
            "jax_ep builds its native code with Bazel, and neither bazel nor bazelisk is on the "
            "PATH. Debian: apt-get install bazel-bootstrap bazel-rules-java bazel-rules-proto "
            "bazel-platforms; elsewhere see https://bazel.build/install")
    return bazel


def build_modules(root: pathlib.Path) -> list[pathlib.Path]:
    """Builds the native modules of the workspace at `root` for this interpreter."""
    build_path = dict.fromkeys(
        str(pathlib.Path(importlib.util.find_spec(package).origin).parents[1])
        for package in ("jaxlib", "nanobind"))
    flags = [f"--repo_env=JAX_EP_PYTHON={sys.executable}",
             f"--repo_env=JAX_EP_BUILD_PATH={os.pathsep.join(build_path)}"]

    def bazel(*command: str) -> str:
        result = subprocess.run([find_bazel(), *command, *flags], cwd=root, text=True,
                                stdout=subprocess.PIPE)
        if result.returncode:
            sys.exit(f"jax_ep: bazel {command[0]} failed; its output is above")
        return result.stdout.strip()

    bazel("build", "//jax_ep/_native:modules_list")
    modules_list = pathlib.Path(bazel("info", "bazel-bin")) / _MODULES_LIST
    execution_root = pathlib.Path(bazel("info", "execution_root"))
    return [execution_root / line for line in modules_list.read_text().split()]


class BuildHook(BuildHookInterface):
    """Adds the native modules to a wheel; an editable one gets them in the source tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict) -> None:
        root = pathlib.Path(self.root)
        folder = pathlib.Path("jax_ep", "_native")
        modules = build_modules(root)
        if version == "editable":
            # Away with old ones first: also because a running program may have them mapped.
            for old in (root / folder).glob("*.so"):
                old.unlink()
            for module in modules:
                shutil.copy(module, root / folder / module.name)
        else:
            for module in modules:
                build_data["force_include"][str(module)] = str(folder / module.name)
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"{python}-{python}-{platform}"
