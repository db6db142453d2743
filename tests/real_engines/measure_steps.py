"""Measures the steps of a real vLLM on CPU, for simulator/engines/calibration.py.

    cd tests/real_engines
    ../../build/real-engines/vllm-venv/bin/python measure_steps.py SECONDS > steps.jsonl

Prompts and answers of many lengths come at random; each line is what one step computed, as the
engine's own scheduler decided it, and what it took. Counted are seconds of this process's CPU, on
one thread, so that whoever else works on the machine doesn't show. The model is small, with random
weights; prefix caching is off.
"""

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    DO_NOT_TRACK="1",
    TORCHDYNAMO_DISABLE="1",
)

import make_model
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

HIDDEN = 256
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
CONTEXT = 8192
STEP_TOKENS = 1024
SLOTS = 32
WARM_UP = 50
"""Steps at the beginning, before memory is mapped and caches are warm."""
COMES = 0.15
"""Chance of a burst before a step."""

scheduled = []
"""Of each step that the engine decided, each request: (tokens, computed before, prompt tokens)."""


def watch_scheduler():  # type: ignore[no-untyped-def]
    original = Scheduler.schedule

    def schedule(self, *arguments, **options):  # type: ignore[no-untyped-def]
        output = original(self, *arguments, **options)
        scheduled.append([])
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            before = request.num_computed_tokens - tokens  # already moved on
            scheduled[-1].append((tokens, before, request.num_prompt_tokens))
        return output

    Scheduler.schedule = schedule


def work(batch):  # type: ignore[no-untyped-def]
    """Amounts by the names of simulator.engines.calibration.Measurement."""
    prompts = [(tokens, before) for tokens, before, prompt in batch if before < prompt]
    return {
        "prefill_tokens": sum(tokens for tokens, _ in prompts),
        "pairs": sum(tokens * (before + (tokens + 1) / 2) for tokens, before in prompts),
        "sequences": len(batch),
        "context_tokens": sum(before for _, before, prompt in batch if before >= prompt),
    }


def engine(folder):  # type: ignore[no-untyped-def]
    make_model.HIDDEN, make_model.LAYERS, make_model.CONTEXT = HIDDEN, 4, CONTEXT
    make_model.make_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= SHAPE | {"intermediate_size": 4 * HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            load_format="dummy",
            enforce_eager=True,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=SLOTS,
            block_size=32,
            enable_prefix_caching=False,
        )
    )


def main(seconds):  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    watch_scheduler()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        llm = engine(Path(folder))
        number = steps = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if rng.random() < COMES or not llm.has_unfinished_requests():
                for _ in range(rng.choice([1, 1, 2, 8])):
                    tokens = [
                        rng.randrange(300, 1000) for _ in range(int(10 ** rng.uniform(0.5, 3.6)))
                    ]
                    outputs = rng.choice([2, 8, 30, 60])
                    llm.add_request(
                        str(number),
                        {"prompt_token_ids": tokens},
                        SamplingParams(max_tokens=outputs, ignore_eos=True, detokenize=False),
                    )
                    number += 1
            scheduled.clear()
            started = time.process_time()
            llm.step()
            took_s = time.process_time() - started
            steps += 1
            if steps > WARM_UP and len(scheduled) == 1 and scheduled[0]:
                row = {"seconds": round(took_s, 6)} | work(scheduled[0])
                sys.__stdout__.write(json.dumps(row) + "\n")


main(float(sys.argv[1]))
