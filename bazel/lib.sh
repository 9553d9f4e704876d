# shellcheck shell=bash
# What the set-up and test scripts share. Source it from the top of the checkout.

say() { echo "$(basename "$0" .sh): $*"; }
die() { echo "$(basename "$0" .sh): error: $*" >&2; exit 1; }

# Prints the real path of interpreter $1 if it runs and its minor version is in [$2, $3].
usable_python() {
  "$1" -c "
import os, sys
sys.exit(1) if not (3, $2) <= sys.version_info[:2] <= (3, $3) else print(os.path.abspath(sys.executable))
" 2>/dev/null
}

# Prints a Python 3 whose minor version is in [$1, $2]: python3 if it will do, else the newest.
# A pyenv shim may be on the PATH for a version that is not switched on, hence the second look.
find_python() {
  local candidate minor
  for candidate in python3 $(for ((minor = $2; minor >= $1; minor--)); do
    echo "python3.$minor" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3."$minor".*/bin/python3
  done); do
    usable_python "$candidate" "$1" "$2" && return
  done
  return 1
}

# The interpreter that the user asked for with PYTHON, or the first that will do.
choose_python() {
  if [[ -n ${PYTHON:-} ]]; then
    usable_python "$PYTHON" 11 99 || die "PYTHON=$PYTHON does not run, or is older than 3.11"
  else
    find_python 11 13 || find_python 11 99 || die "no Python 3.11 or newer found; set PYTHON"
  fi
}

apt_install() {
  local sudo=()
  ((EUID == 0)) || sudo=(sudo)
  command -v apt-get >/dev/null && command -v "${sudo[@]:-env}" >/dev/null ||
    die "please install: $*"
  say "installing Debian packages, which can take minutes: $*"
  { "${sudo[@]}" apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get -qq install --no-install-recommends "$@"
  } </dev/null >/dev/null || die "apt-get failed; please install: $*"
}

# Prints a Bazel that runs: $BAZEL, or bazel or bazelisk from the PATH, or Debian's.
find_bazel() {
  local candidate
  for candidate in ${BAZEL:-bazel bazelisk /usr/bin/bazel}; do
    "$candidate" --version >/dev/null 2>&1 && command -v "$candidate" && return
  done
  return 1
}

# Sets and exports BAZEL, from Debian's packages where there is none.
ensure_bazel() {
  local packages=(bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-platforms)
  if ! find_bazel >/dev/null; then
    [[ -z ${BAZEL:-} ]] || die "BAZEL=$BAZEL does not run"
    apt_install "${packages[@]}"
  fi
  BAZEL=$(find_bazel) || die "no Bazel runs. Install bazelisk, or on Debian: ${packages[*]}"
  # Debian's Bazel, the one without a version, brings the rules in packages of their own.
  if [[ $("$BAZEL" --version) == *no_version && ! -d /usr/share/bazel/rules/java ]]; then
    apt_install "${packages[@]}"
  fi
  export BAZEL
}

# Makes sure that Python $1 can make a venv and compile extensions.
ensure_python_parts() {
  local packages=()
  "$1" -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    packages+=(python3-dev)
  ((${#packages[@]} == 0)) && return
  [[ $1 == /usr/bin/* ]] || die "$1 lacks what Debian has in: ${packages[*]}"
  apt_install "${packages[@]}"
}

# The end of the supported jax range that venv $1 tests, by its Python: a name in requirements/.
end_of_range() {
  "$1"/bin/python -c 'import sys; print("newest" if sys.version_info >= (3, 12) else "oldest")'
}

# Prints a hash of the files under the paths given.
hash_files() {
  find "$@" -type f -not -name '*.so' -not -name '*.pyc' -print0 | sort -z |
    xargs -0 sha256sum | sha256sum | cut -c1-16
}

# Puts requirements/$3.txt into venv $1 of Python $2, from scratch where Python has changed. Prints
# nothing and returns at once when it is there already.
ensure_venv() {
  local venv=$1 python=$2 end=$3 key
  key="$python $end $(hash_files "requirements/$end.txt")"
  [[ -f $venv/packages && $(<"$venv/packages") == "$key" ]] && return
  if [[ ! -f $venv/packages || $(<"$venv/packages") != "$python $end "* ]]; then
    say "creating $venv with $python"
    rm -rf "$venv"
    ensure_python_parts "$python"
    "$python" -m venv "$venv"
  fi
  rm -f "$venv/packages"
  say "installing requirements/$end.txt into $venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "requirements/$end.txt"
  echo "$key" >"$venv/packages"
}

# Runs `bazel test` on the targets of query expression $1 with the flags that follow, and prints
# what became of them.
run_tests() {
  local targets status=0
  targets=$("$BAZEL" query --noshow_progress "tests($1) except attr(tags, manual, $1)")
  shift
  # shellcheck disable=SC2086
  "$BAZEL" test --show_progress_rate_limit=30 "$@" -- $targets || status=$?
  # shellcheck disable=SC2086
  .venv/bin/python bazel/test_summary.py \
    "$("$BAZEL" info --noshow_progress bazel-testlogs)" $targets
  return $status
}
