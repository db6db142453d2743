"""Other people's programs against kvroute's server: `make interop` runs them."""

import os

collect_ignore_glob = [] if os.environ.get("KVROUTE_INTEROP") else ["test_*.py"]
