#!/usr/bin/env bash
# The last step of an image: this package, its bytecode, the embedded model and the list of packages.
#
#   install.sh cpu|cuda
#
# The model is made in /var/cache/rdt-e2e, which a builder may keep, and lies in the image: every node
# then has the same bytes without a shared volume.
set -euo pipefail
cd "$(dirname "$0")/.."

# Nothing of what libraries write there belongs into the image.
HOME=$(mktemp -d)
trap 'rm -rf "$HOME"' EXIT
export HOME HF_HOME=$HOME/huggingface HF_MODULES_CACHE=$HOME/modules

scripts/setup.sh "$1"
.venv/bin/python -m compileall -q --invalidation-mode unchecked-hash rdt_e2e
.venv/bin/rdt-e2e mini-kimi --cache-dir /var/cache/rdt-e2e
mkdir models
cp -r /var/cache/rdt-e2e/mini-kimi models/
chmod -R g=u models
.venv/bin/pip inspect >packages.json
# Locks that uv leaves.
rm -f /tmp/uv-*.lock
