#!/usr/bin/env bash
# checkov on every object of k8s/ and its overlays, with the pods that KubeRay would make of them: inside
# a RayCluster or a RayJob it sees none. Exceptions and their reasons: .checkov.yaml.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
tool=$venv/checkov
lock=requirements/checkov.lock
wanted=$(sha256sum "$lock")

if [ "$wanted" != "$(cat "$tool/stamp" 2>/dev/null)" ]; then
  echo "lint-k8s: $tool with the packages of $lock"
  "$venv/bin/uv" venv --quiet --clear --python "$venv/bin/python" "$tool"
  "$venv/bin/uv" pip sync --quiet --python "$tool/bin/python" --require-hashes "$lock"
  printf '%s' "$wanted" >"$tool/stamp"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The tests' kubectl renders the overlays.
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m tests.k8s_objects "$work"
"$tool/bin/checkov" --config-file .checkov.yaml --directory "$work"
