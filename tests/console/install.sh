#!/bin/sh
# install.sh FOLDER PYTHON: Playwright's client and axe-core below FOLDER; Chromium is the system's.
set -eu
mkdir -p "$1"
if [ ! -d "$1/python/playwright" ]; then
    "$2" -m pip install --quiet --disable-pip-version-check --target "$1/python" \
        --requirement "$(dirname "$0")/requirements.txt"
fi
if [ ! -f "$1/package/axe.min.js" ] && command -v npm > /dev/null; then
    (cd "$1" && npm pack --silent axe-core@4.14.1 > npm.log && tar -xzf axe-core-*.tgz)
fi
