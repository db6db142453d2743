"""Tests that build an image or a release, minutes each, need KVROUTE_BUILDS: `make image-test` and
`make release-test` set it."""

import os

collect_ignore = [] if os.environ.get("KVROUTE_BUILDS") else ["test_image.py", "test_release.py"]
