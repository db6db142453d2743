"""Records what vLLM's own scheduler decides, step by step, for the simulator's to be held against.

    cd tests/real_engines
    ../../build/real-engines/vllm-venv/bin/python record_schedules.py 120 | gzip -9n \
        > ../simulator/data/vllm_0_32_schedules.jsonl.gz

No model runs: the scheduler gets random requests, and the tokens that a model would have sampled.
Each line is one engine: its limits, the requests that come and go, and for each step whom it
computed, with tokens, the batch, the queue, and the events.
"""

import json
import os
import random
import sys
from pathlib import Path

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    DO_NOT_TRACK="1",
    OMP_NUM_THREADS="1",
)

import make_model
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
ACCEPTED = 0.6
LORAS = ("red", "blue", "green")


class Ordered(dict):
    """In place of the scheduler's set of those who have ended, whose order is left to chance."""

    def add(self, one):
        self[one] = None


class Publisher:
    """Hears of the host only: the device's events are taken before."""

    def __init__(self):
        self.events = []

    def publish(self, batch):
        self.events += batch.events


def text(family: int, length: int) -> list[int]:
    """Equal families: equal tokens as far as both reach."""
    return [2 + (family * 131 + at * 17) % 1000 for at in range(length)]


def limits(rng: random.Random) -> dict:
    chunked = rng.random() < 0.85
    blocks = rng.choice([12, 20, 40])
    return {
        "block_count": blocks,
        "max_model_len": blocks * BLOCK,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "step_tokens_max": rng.choice([24, 100, 400]) if chunked else blocks * BLOCK,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": rng.choice([0, 0, 20]) if chunked else 0,
        "policy": rng.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.0, 0.2]),
        "num_speculative_tokens": rng.choice([0, 0, 3]),
        "max_loras": rng.choice([1, 2]),
        "host_block_count": rng.choice([0, 0, 8, 20, 60]),
    }


def requests(rng: random.Random, blocks: int) -> list[dict]:
    told = []
    for index in range(rng.randint(4, 16)):
        prompt = rng.randint(1, blocks * BLOCK // 2)
        told.append(
            {
                "step": int(rng.expovariate(0.15)),
                "family": rng.choice([0, 1, 100 + index]),
                "prompt": prompt,
                "output": rng.randint(1, min(60, blocks * BLOCK - prompt)),
                "priority": rng.choice([0, 0, 0, -3, 5]),
                "lora": rng.choice(["", "", "", *LORAS]),
                "abort": rng.choice([None, None, None, None, int(rng.expovariate(0.05))]),
            }
        )
    return sorted(told, key=lambda one: one["step"])


def scheduler(told: dict, model: Path) -> Scheduler:
    drafts = told["num_speculative_tokens"]
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=told["max_num_seqs"],
            max_num_batched_tokens=told["step_tokens_max"],
            max_model_len=4096,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=told["long_prefill_token_threshold"],
            policy=told["policy"],
            scheduler_reserve_full_isl=told["scheduler_reserve_full_isl"],
            watermark=told["watermark"],
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        lora_config=LoRAConfig(max_loras=told["max_loras"], max_cpu_loras=8),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        speculative_config=SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3
        )
        if drafts
        else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20},
        )
        if told["host_block_count"]
        else None,
    )
    blocks = told["block_count"] + 1  # one is its null block
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    engine = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    # What the checks of a configuration don't let through with a model of this length.
    engine.max_model_len = engine.kv_cache_manager.max_model_len = told["max_model_len"]
    engine.scheduler_config.enable_chunked_prefill = told["enable_chunked_prefill"]
    if engine.connector is not None:
        engine.connector.connector_scheduler.manager = CPUOffloadingManager(
            told["host_block_count"], enable_events=True
        )
    return engine


def record(seed: int, model: Path) -> dict:
    rng = random.Random(seed)
    told = limits(rng)
    come = requests(rng, told["block_count"])
    engine = scheduler(told, model)
    draws = random.Random(0)
    hasher = get_request_block_hasher(BLOCK, sha256)
    names: dict[object, int] = {}
    loads = {}  # request -> (job, step with whose output it has come)
    steps = []
    for number in range(2000):
        aborted = []
        for index, one in enumerate(come):
            if one["step"] == number:
                engine.add_request(_request(index, one, hasher))
            if one["abort"] is not None and one["step"] + one["abort"] + 1 == number:
                request = engine.requests.get(str(index))
                if request and request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                    engine.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
                    aborted.append(index)
        output = engine.schedule()
        engine.finished_req_ids = Ordered()
        jobs = {}
        if output.kv_connector_metadata is not None:
            for job, load in output.kv_connector_metadata.load_jobs.items():
                loads[load.req_id] = (job, number + rng.randint(0, 3))
            jobs = dict.fromkeys(output.kv_connector_metadata.store_jobs, 1)
        loaded = [one for one, (_, until) in loads.items() if until == number]
        jobs |= {loads.pop(one)[0]: 1 for one in loaded}
        step = {
            "aborted": aborted,
            "scheduled": [[int(one), n] for one, n in output.num_scheduled_tokens.items()],
            "preempted": bool(output.preempted_req_ids),
            "running": [int(one.request_id) for one in engine.running],
            "waiting": [
                int(one.request_id)
                for queue in (engine.kv_holding_waiting, engine.waiting)
                for one in queue
            ],
            "loaded": [int(one) for one in loaded],
            "events": [_event(one, names) for one in engine.kv_cache_manager.take_events()],
        }
        told_by_workers = KVConnectorOutput(
            finished_recving=set(loaded),
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=jobs),
        )
        publisher = engine.kv_event_publisher = Publisher()
        _sample(engine, output, draws, told["num_speculative_tokens"], told_by_workers)
        if engine.connector is not None:
            step["host"] = sorted(name for one in publisher.events for name in _event(one, names))
        steps.append(step)
        if number > max(one["step"] for one in come) and not engine.has_unfinished_requests():
            break
    else:
        raise SystemExit(f"seed {seed} doesn't end")
    return {"seed": seed, "config": told, "requests": come, "steps": steps}


def _request(index, one, hasher):
    lora = one["lora"]
    return Request(
        request_id=str(index),
        prompt_token_ids=text(one["family"], one["prompt"]),
        sampling_params=SamplingParams(max_tokens=one["output"], ignore_eos=True),
        pooling_params=None,
        arrival_time=float(index),
        priority=one["priority"],
        lora_request=LoRARequest(lora, LORAS.index(lora) + 1, "/nowhere") if lora else None,
        block_hasher=hasher,
    )


def _sample(engine, output, draws, drafts, told_by_workers):
    """What a model would bring out: of drafted tokens as many as the draws say, and one more."""
    ids = list(output.num_scheduled_tokens)
    tokens = []
    for one in ids:
        request = engine.requests[one]
        if request.num_computed_tokens < request.num_tokens:
            tokens.append([])
            continue
        drafted = sum(draft >= 0 for draft in output.scheduled_spec_decode_tokens.get(one, ()))
        accepted = 0
        while accepted < drafted and draws.random() < ACCEPTED:
            accepted += 1
        first = request.num_tokens
        family = 1000 + int(one)
        tokens.append(text(family, first + accepted + 1)[first:])
    engine.update_from_output(
        output,
        ModelRunnerOutput(
            ids,
            {one: i for i, one in enumerate(ids)},
            tokens,
            kv_connector_output=told_by_workers if engine.connector is not None else None,
        ),
    )
    if drafts:
        ready = [one for i, one in enumerate(ids) if tokens[i] and one in engine.requests]
        engine.update_draft_token_ids(DraftTokenIds(ready, [[7] * drafts for _ in ready]))


def _event(event, names):
    kind = type(event).__name__
    if kind == "BlockStored":
        return [names.setdefault(one, len(names)) for one in event.block_hashes]
    return [-1 - names[one] for one in event.block_hashes]


def main() -> None:
    init_none_hash(sha256)
    model = Path("../../build/real-engines/model").resolve()
    if not model.exists():
        make_model.make_model(model)
    for seed in range(int(sys.argv[1])):
        sys.stdout.write(json.dumps(record(seed, model), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
