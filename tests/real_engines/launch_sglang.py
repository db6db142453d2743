"""sglang.launch_server, with the libraries that need a GPU replaced by dummies (also in children,
through the .pth file that install.sh writes). Runs in SGLang's environment."""

import runpy
import sys

import stub_gpu_libs  # noqa: F401

sys.argv[0] = "sglang"
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
