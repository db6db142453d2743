"""`python3 -m sglang.launch_server --model-path MODEL ...` by simulated engines."""

from standin import run

run("sglang")
