"""The flags of vLLM and SGLang as those of `kvroute simulate`, which takes this process over.

Flags without a meaning for a simulated engine are named on the output and left out. The words of
the environment's SIMULATE, such as `--speed 10`, are added.
"""

import argparse
import json
import os
import sys

FLAGS = argparse.ArgumentParser(allow_abbrev=False)
FLAGS.add_argument("--host", default="::")
FLAGS.add_argument("--port")
FLAGS.add_argument("--max-num-seqs", "--max-running-requests", dest="slots")
FLAGS.add_argument("--block-size", "--page-size", default="16")
FLAGS.add_argument("--served-model-name")
FLAGS.add_argument("--kv-events-config", type=json.loads, default={})
FLAGS.add_argument("--disaggregation-mode", choices=["prefill", "decode"], default="engines")
FLAGS.add_argument("--shutdown-timeout")


def run(engine: str) -> None:
    """engine: vllm or sglang. Does not return."""
    if engine == "vllm":
        FLAGS.add_argument("command", choices=["serve"])
        FLAGS.add_argument("model")
    else:
        FLAGS.add_argument("--model-path", "--model", dest="model", required=True)
    given, others = FLAGS.parse_known_args()
    if others:
        print("left out:", *others, flush=True)  # noqa: T201
    port = given.port or {"vllm": "8000", "sglang": "30000"}[engine]
    words = ["--engine", engine, "--host", given.host, "--port", port]
    words += ["--model", given.served_model_name or given.model, "--block-size", given.block_size]
    if given.slots:
        words += ["--engine-option", f"max_num_seqs={given.slots}"]
    if events := given.kv_events_config.get("endpoint"):
        words += ["--events-port", events.rpartition(":")[2]]
    # SGLang finishes what has begun, however long that takes.
    words += ["--drain-s", given.shutdown_timeout or {"vllm": "0", "sglang": "3600"}[engine]]
    words += [f"--{given.disaggregation_mode}", "1", *os.environ.get("SIMULATE", "").split()]
    python = sys.executable
    os.execv(python, [python, "-m", "router.app.main", "simulate", *words])
