#!/usr/bin/env bash
# Make .venv hold exactly what the lock file of a target says, and this package. Does nothing when it
# already does.
#
#   scripts/setup.sh [cpu|cuda] [packages-only]
#   scripts/setup.sh ansible       .venv-ansible instead, which runs ansible/ and holds nothing of ours
#
# PYTHON=... chooses the interpreter (3.11 or 3.12). packages-only leaves this package out, so that an
# image can have the others in a layer of their own.
#
# pip's own settings (index, CA bundle, wheel folders) are honoured; nothing else is configured here.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:-cpu}
venv=.venv
[ "$target" != ansible ] || venv=.venv-ansible
lock=requirements/$target.lock
torch_version=2.13.0

# Their own progress bars on a terminal, our lines alone elsewhere.
quiet=()
[ -t 1 ] || quiet=(--quiet)

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }

[ -f "$lock" ] || die "no lock file '$target'; LOCK is cpu or cuda"

# Two runs at once (two terminals) would build into the same folder.
exec 9>.setup.lock
flock 9

environment_stamp() {
  printf '%s %s\n' "$target" "$PWD"
  sha256sum requirements/bootstrap.txt "$lock" scripts/setup.sh
}
package_stamp() { sha256sum pyproject.toml setup.py; }
is_current() { [ -f "$venv/$1" ] && [ "$("${1//-/_}")" = "$(cat "$venv/$1")" ]; }

find_python() {
  local candidate found=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    # A shim or a Debian interpreter without its venv package exists, but does not do.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        printf '%s' "$candidate"
        return
      fi
      found=$candidate
    fi
  done
  if [ -n "$found" ]; then
    die "$found cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv"
  fi
  die "needs Python 3.11 or 3.12; install one, or name it: make setup PYTHON=/path/to/python3.11"
}

# From all of pip's files; `pip config get` reads the user's alone.
pip_setting() { "$venv/bin/pip" config list | sed -n "s/^global\.$1='\(.*\)'$/\1/p"; }

# uv reads no pip configuration: hand it the index and the CA bundle that pip would use.
use_pip_settings() {
  local index=${PIP_INDEX_URL:-} cert=${PIP_CERT:-}
  [ -n "$index" ] || index=$(pip_setting index-url)
  [ -n "$cert" ] || cert=$(pip_setting cert)
  if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then export UV_DEFAULT_INDEX=$index; fi
  if [ -n "$cert" ] && [ -z "${SSL_CERT_FILE:-}" ]; then export SSL_CERT_FILE=$cert; fi
}

# A CPU build of torch is not on the Python index. pip takes it from wherever its settings point (an
# extra index, a folder of wheels); from the plain index it takes the larger CUDA build.
install_torch() {
  say "torch $torch_version"
  "$venv/bin/pip" install "${quiet[@]}" --disable-pip-version-check --no-deps --no-compile "torch==$torch_version"
}

# The CUDA build does not import without its CUDA libraries, which torch itself pins.
complete_torch() {
  if ! "$venv/bin/python" -c 'import sys, importlib.metadata as m; sys.exit("+cpu" not in m.version("torch"))'; then
    say "torch came as its CUDA build; adding the libraries that it loads"
    "$venv/bin/pip" install "${quiet[@]}" --disable-pip-version-check --no-compile "torch==$torch_version"
  fi
}

check_torch() {
  local installed
  installed=$("$venv/bin/python" -c 'import torch; print(torch.__version__)') ||
    die "the installed torch does not import; remove $venv and run again"
  case "$installed" in
    # "+cu..." is what the index's own build calls itself once imported.
    "$torch_version" | "$torch_version+cpu" | "$torch_version+cu"*) ;;
    *) die "torch is $installed, expected $torch_version or $torch_version+cpu; remove $venv and run again" ;;
  esac
}

check_system() {
  # vLLM's CPU kernels link it, and no wheel carries it.
  if [ "$target" = cpu ] && ! "$1" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    die "libnuma.so.1 is missing; on Debian or Ubuntu: apt-get install libnuma1"
  fi
}

build_environment() {
  local python
  python=$(find_python)
  check_system "$python"
  if [ -e "$venv" ] && [ ! -e "$venv/.rdt-e2e" ]; then
    die "$venv exists and was not made by this script; move it away and run again"
  fi
  # From nothing: a package that left the lock file must leave the environment too.
  rm -rf "$venv"
  mkdir "$venv"
  touch "$venv/.rdt-e2e"
  say "$venv with $("$python" --version), target $target"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install "${quiet[@]}" --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
  use_pip_settings
  if [ "$target" = cpu ]; then install_torch; fi
  say "the packages of $lock"
  "$venv/bin/uv" pip install "${quiet[@]}" --python "$venv/bin/python" --no-deps --require-hashes \
    -r "$lock"
  if [ "$target" = cpu ]; then complete_torch; fi
  if [ "$target" != ansible ]; then check_torch; fi
  environment_stamp >"$venv/environment-stamp"
}

install_package() {
  # setuptools is in the lock file, so building needs no index.
  "$venv/bin/uv" pip install --quiet --offline --python "$venv/bin/python" --no-deps \
    --no-build-isolation --editable .
  package_stamp >"$venv/package-stamp"
}

is_current environment-stamp || build_environment
if [ "$target" != ansible ] && [ "${2:-}" != packages-only ]; then
  is_current package-stamp || install_package
fi
