#!/usr/bin/env bash
# Makes .venv ready, with jax_ep in it as an editable install, and Bazel ready for plain
# `bazel build //...` and `bazel test //...`. Does only what is not done yet.
#
# PYTHON chooses the interpreter, BAZEL the Bazel.
set -euo pipefail
cd "$(dirname "$0")/.."
source bazel/lib.sh

venv=.venv
native_build=$venv/native-build

ensure_bazel
if [[ -z ${PYTHON:-} && -f $venv/packages ]] && $venv/bin/python -c '' 2>/dev/null; then
  python=$(cut -d' ' -f1 $venv/packages)
else
  python=$(choose_python)
fi
end=newest
usable_python "$python" 11 11 >/dev/null && end=oldest
ensure_venv $venv "$python" $end

# The modules build against the oldest FFI headers, which the venv's own jaxlib may not have.
build_requires=$($venv/bin/python -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
if [[ ! -f $native_build/requires || $(<$native_build/requires) != "$build_requires" ]]; then
  say "installing $build_requires into $native_build"
  rm -rf $native_build
  # hatchling's own dependencies are among the locked requirements.
  # shellcheck disable=SC2086
  $venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
    --target $native_build $build_requires
  echo "$build_requires" >$native_build/requires
fi

# "common", so that `bazel query` sees the same repositories.
bazelrc="common --repo_env=JAX_EP_PYTHON=$PWD/$venv/bin/python
common --repo_env=JAX_EP_BUILD_PATH=$PWD/$native_build
common --repo_env=JAX_EP_ENVIRONMENT=$(sha256sum <$venv/packages | cut -c1-16)"
case $("$BAZEL" --version) in
  "bazel 7."*) bazelrc+=$'\ncommon --noenable_bzlmod' ;;
  "bazel 8."*) bazelrc+=$'\ncommon --noenable_bzlmod --enable_workspace' ;;
esac
[[ -f .bazelrc.local && $(<.bazelrc.local) == "$bazelrc" ]] || echo "$bazelrc" >.bazelrc.local

native_key="$(<$venv/packages) $(<$native_build/requires) $(command -v nvcc || true) $(hash_files \
  BUILD WORKSPACE .bazelrc pyproject.toml bazel csrc xla_ffi jax_ep/_native)"
module=jax_ep/_native/_cpu$($venv/bin/python -c '
import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
if [[ ! -f $module || ! -f $venv/native || $(<$venv/native) != "$native_key" ]]; then
  say "building and installing jax_ep"
  # The install builds, too; this is to see how it goes.
  "$BAZEL" build //jax_ep/_native:modules_list
  PYTHONPATH=$PWD/$native_build $venv/bin/python -m pip install -qq --disable-pip-version-check \
    --no-deps --no-build-isolation --editable .
  echo "$native_key" >$venv/native
fi
