"""These tests need Envoy's binary, whose path is in KVROUTE_ENVOY: `make envoy` sets it."""

import os

collect_ignore_glob = [] if os.environ.get("KVROUTE_ENVOY") else ["test_*.py"]
