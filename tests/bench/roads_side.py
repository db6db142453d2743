"""Decisions of one checkout, timed on demand: the side of roads.py that runs in it.

Reads lines {"policy", "workers", "case", "decisions"}; answers each with a line {"us", "own_us"}:
microseconds of CPU a decision, from a request's bytes to its answer's, and of them those of a
policy of the operator's own. Uses what each checkout has since 8915f72: the process's parts
(RouterApp, not started), Desk.route, messages of events/plane/facts.py, and what `kvroute serve`
sets for its process (settle).
"""

import json
import random
import sys
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from events.plane.facts import Beat, Epoch, FactsMessage, Heartbeat, Stored, encode, pack_hashes
from indexer.hashing import block_hashes, hash_seed, prefix_hashes
from indexer.identity import WorkerKey
from kvroute.v1 import router_pb2
from router.app.cli.run import settle
from router.app.processes.router_process import RouterApp
from router.config.settings.configurations import ServeConfig
from router.decide.core.progress import Progress, ProgressState

PROMPTS = 20
PROMPT_TOKENS = 8192
OWN_TOKENS = 512
BLOCK_SIZE = 16
LORA = "adapter"
OWN = "roads_side:spread"
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tenant": {"tenant": "team"},
    "label": {"required_labels": {"zone": "a"}},
    "lora": {"lora_name": LORA},
    "session": {"session_id": "s"},
    "key": {"tenant": "team", "lora_name": LORA, "required_labels": {"zone": "a"}},
    "pair": {"phase": router_pb2.PHASE_PREFILL_DECODE},
}
"""Case -> what its requests have beside tokens. `tenant` and `key` meet a quota, `pair` workers of
two roles; half of the workers have the label."""

_spent_s = 0.0


def spread(rows: Any) -> Any:
    """A policy of the operator's own, in numpy."""
    global _spent_s
    began = time.process_time()
    costs = rows.new_tokens / 1000 + rows.active_blocks / np.maximum(rows.total_blocks, 1)
    _spent_s += time.process_time() - began
    return costs


class Stage:
    """A router's process that is not started, a fleet as it sees it, and requests to it."""

    def __init__(self, policy: str, workers: int, case: str) -> None:
        quota = {"tenants": {"default": {"in_flight_max": 1_000_000}}}
        config = {
            "routing": {"policy": policy, "own_policies": [OWN] if policy == OWN else []},
            "queue": quota if case in ("tenant", "key") else {},
            "fleet": {"workers_max": workers},
        }
        self._now_s = 1000.0
        self._app = RouterApp(msgspec.convert(config, ServeConfig), clock=lambda: self._now_s)
        self._app.core.fleet.ready = True
        self._pairs = case == "pair"
        self._rng = np.random.default_rng(1)
        self._prompts = [_tokens(self._rng, PROMPT_TOKENS) for _ in range(PROMPTS)]
        self._asked = 0
        self._in_flight: deque[str] = deque()
        self._in_flight_max = 4 * workers
        self._meet(workers)

    def _meet(self, workers: int) -> None:
        view = self._app.core.fleet.view
        view._beat_timeout_s = view._forget_s = 86_400.0
        seeds = {"": hash_seed("", ""), LORA: hash_seed(LORA, "")}
        chains = [
            prefix_hashes(block_hashes(one, BLOCK_SIZE, seed))
            for one in self._prompts
            for seed in seeds.values()
        ]
        for i in range(workers):
            key, epoch = WorkerKey(f"worker-{i}", 0), Epoch(1, i)
            lengths = (8 * (1 + (37 * i + 11 * n) % 64) for n in range(len(chains)))
            facts = [
                Stored(pack_hashes(chain[:length]), "device")
                for chain, length in zip(chains, lengths, strict=True)
            ]
            view.on_stream(key, encode(FactsMessage(1, epoch, 1, facts, 1.0)), self._now_s)
            slot = view.sources[key].slot
            beat = Beat(1, epoch, 1, view.index.count(slot), view.index.digest(slot), True, 1.0)
            view.on_stream(key, encode(beat), self._now_s)
            view.on_heartbeat(key, encode(self._heartbeat(epoch, i)), self._now_s)
            self._app.core.on_heartbeat(key, self._now_s)

    def _heartbeat(self, epoch: Epoch, i: int) -> Heartbeat:
        roles = ("prefill", "decode")
        return Heartbeat(
            epoch=epoch,
            address=f"http://10.0.{i // 256}.{i % 256}:8000",
            engine="vllm",
            model="m",
            lora_names=(LORA,),
            labels={"zone": "ab"[i // 2 % 2]},
            role=roles[i % 2] if self._pairs else "both",
            kv_connector="NixlConnector" if self._pairs else "",
            block_size=BLOCK_SIZE,
            total_blocks=100_000,
            total_slots=1024,
            running=i % 7,
            waiting=i % 3,
            used_blocks=float(i % 50 * 100),
            sampled_at_s=1.0,
            sent_at_s=1.0,
        )

    def measure(self, case: str, decisions: int) -> dict[str, float]:
        own = sys.modules["roads_side"]
        own_before = own._spent_s
        requests = []
        for _ in range(decisions):
            self._asked += 1
            shared = self._prompts[self._asked % PROMPTS]
            mine = _tokens(self._rng, OWN_TOKENS)
            tokens = shared[: 4 * (PROMPT_TOKENS - OWN_TOKENS)] + mine
            request = router_pb2.RouteRequest(request_id=f"request-{self._asked}", **FIELDS[case])
            request.token_bytes = tokens
            requests.append(request.SerializeToString())
        spent_s = 0.0
        route, core = self._app.desk.route, self._app.core
        for request in requests:
            self._now_s += 0.001
            began = time.process_time()
            answered = route(request)
            spent_s += time.process_time() - began
            self._in_flight.append(answered[1].id)
            if len(self._in_flight) > self._in_flight_max:
                ended = Progress(self._in_flight.popleft(), ProgressState.FINISHED)
                core.report(ended, self._now_s)
            if self._asked % 250 == 0:
                core.fleet.view.predictions.tick(self._now_s)
                core.tick(self._now_s)
        return {
            "us": spent_s / decisions * 1e6,
            "own_us": (own._spent_s - own_before) / decisions * 1e6,
        }


def _tokens(rng: np.random.Generator, count: int) -> bytes:
    return rng.integers(0, 150_000, count, np.uint32).tobytes()


def main() -> None:
    import roads_side  # the module that the router finds its own policy in

    random.seed(1)
    settle()
    stages: dict[tuple[str, int, str], Stage] = {}
    for line in sys.stdin:
        told = json.loads(line)
        kind = told["case"] if told["case"] in ("pair", "tenant", "key") else "plain"
        name = (told["policy"], told["workers"], "tenant" if kind == "key" else kind)
        if name not in stages:
            if len(stages) >= 3:
                stages.clear()
            stages[name] = roads_side.Stage(*name)
            stages[name].measure(told["case"], told["decisions"])
        result = stages[name].measure(told["case"], told["decisions"])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
