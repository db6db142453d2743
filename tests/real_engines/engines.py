"""Real engines on loopback: how each is started, asked, reset, and relayed."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from typing_extensions import override

from events.engines.endpoints import rank_endpoint
from tests.real_engines.processes import Child
from tests.stage.waiting import free_port, free_ports

MODEL = "tiny"
LORA = "tiny-lora"
MODEL_LEN = 512
SLOTS = 8
HERE = Path(__file__).resolve().parent
NOTHING: Mapping[str, Any] = {}
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks."""

    tokens: tuple[int, ...]
    output_tokens: int = 4
    lora: str = ""
    salt: str = ""
    report_full: bool = False
    """vLLM's kv_cache_report_mode "full": the engine announces reused blocks again."""
    logprobs: bool = False
    """Wants the prompt's log probabilities, so that the engine computes it again."""
    copies: int = 1
    """Outputs asked for: the engine makes as many requests of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said."""

    cached_tokens: int
    output: tuple[int, ...]
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All of it."""


class EngineRefused(RuntimeError):
    """An answer that is no 200; the message has its body."""


async def samples(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """A page of metrics by name and labels."""
    async with session.get(url) as answer:
        lines = (await answer.text()).splitlines()
    told = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {line: float(count) for line, _, count in told}


@dataclass
class Engine(ABC):
    """One engine process and what a relay has to know of it."""

    worker_id: str
    build: Path
    logs: Path
    sockets: Path
    """A folder with a short path, for ipc endpoints."""
    session: aiohttp.ClientSession
    blocks: int
    """Blocks of its cache, a rank: few, so that it evicts."""
    replay_batches: int = 10_000
    """Batches that its replay socket keeps."""
    ranks: int = 1
    first_rank: int = 0
    """The engine's number of its first rank."""
    flags: Sequence[str] = ()
    """More of them, for the engine,"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """for its environment,"""
    told: Sequence[str] = ()
    """and for its relay."""
    port: int = field(default_factory=free_port)
    child: Child = field(init=False)

    name: str = field(init=False, default="")
    block_size: int = field(init=False, default=0)
    events: str = field(init=False, default="")
    _replay: str = field(init=False, default="")

    @abstractmethod
    def __post_init__(self) -> None:
        """Says what it is, and how its process is started."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def relay_flags(self) -> Sequence[str]:
        """Flags of `kvroute relay`, all but the broker's."""

    def replay_of(self, rank: int) -> str:
        """The rank's replay socket."""
        return rank_endpoint(self._replay, self.first_rank + rank)

    @abstractmethod
    async def ask(
        self, prompt: Prompt, headers: Mapping[str, str], more: Mapping[str, Any] = NOTHING
    ) -> Answer:
        """Serves a request, straight from the engine. more: what its body has besides."""

    @abstractmethod
    async def reset(self) -> None:
        """Empties its prefix cache."""

    @abstractmethod
    async def version(self) -> str:
        """Its release."""

    @property
    def caches(self) -> bool:
        """Whether what it has computed or taken over serves later requests."""
        return True

    async def prompt_tokens(self) -> dict[str, float]:
        """Where the tokens of all prompts came from; empty where it doesn't tell."""
        key = "vllm:prompt_tokens_by_source_total{"
        return {
            line.partition('source="')[2].partition('"')[0]: count
            for line, count in (await self.metrics()).items()
            if line.startswith(key)
        }

    async def cache_usage(self) -> float:
        """The share of its cache that requests hold."""
        told = await self.metrics()
        return sum(told[line] for line in told if line.startswith("vllm:kv_cache_usage_perc{"))

    async def metrics(self) -> dict[str, float]:
        """Its samples by name and labels."""
        return await samples(self.session, f"{self.address}/metrics")

    async def answers(self) -> bool:
        """Whether it is healthy."""
        try:
            async with self.session.get(f"{self.address}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> str:
        """The answer's body; raises EngineRefused."""
        url = f"{self.address}{path}"
        async with self.session.post(url, json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise EngineRefused(f"{self.worker_id}: {answer.status} {text[:300]}")
            return text


class Vllm(Engine):
    """vLLM, one rank or several.

    One rank publishes on ipc, which the engine binds. Several need TCP, and on a host of its own
    vLLM's publisher connects, so the relay binds.
    """

    @override
    def __post_init__(self) -> None:
        self.name = "vllm"
        self.block_size = 32
        ports = free_ports(2 * self.ranks) - self.first_rank
        self.events = f"tcp://127.0.0.1:{ports}"
        self._replay = f"tcp://127.0.0.1:{ports + self.ranks}"
        if self.ranks == 1:
            self.events = f"ipc://{self.sockets}/{self.worker_id}.events"
            self._replay = f"ipc://{self.sockets}/{self.worker_id}.replay"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self._replay,
            "topic": "kv-events",
            "buffer_steps": self.replay_batches,
        }
        command = [
            str(self.build / "vllm-venv/bin/python"),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.build / "model"), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(MODEL_LEN), "--max-num-seqs", str(SLOTS)),
            *("--block-size", str(self.block_size)),
            *("--num-gpu-blocks-override", str(self.blocks)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--enable-lora", "--max-lora-rank", "8"),
            *("--lora-modules", f"{LORA}={self.build / 'lora'}"),
            *("--kv-events-config", json.dumps(events)),
            *(("--data-parallel-size", str(self.ranks)) if self.ranks > 1 else ()),
            *self.flags,
        ]
        variables = {
            **_OFFLINE,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **self.variables,
        }
        self.child = Child(self.worker_id, command, self.logs, variables)

    @override
    def relay_flags(self) -> Sequence[str]:
        flags = [
            *("--worker-id", self.worker_id, "--engine", self.name, "--address", self.address),
            *("--events", self.events, "--replay", self._replay, "--topic", "kv-events"),
            *("--ranks", str(self.ranks), "--first-rank", str(self.first_rank)),
            *("--slots", str(SLOTS)),
            *self.told,
        ]
        return [*flags, "--events-bind"] if self.ranks > 1 else flags

    @override
    async def ask(
        self, prompt: Prompt, headers: Mapping[str, str], more: Mapping[str, Any] = NOTHING
    ) -> Answer:
        body: dict[str, object] = {
            "model": prompt.lora or MODEL,
            "prompt": list(prompt.tokens),
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if prompt.salt:
            body["cache_salt"] = prompt.salt
        if prompt.logprobs:
            body["prompt_logprobs"] = 1
        if prompt.copies > 1:
            body |= {"n": prompt.copies, "temperature": 1}
        if prompt.report_full:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        told = json.loads(await self.post("/v1/completions", body | dict(more), headers))
        details = told["usage"].get("prompt_tokens_details") or {}
        output = tuple(told["choices"][0]["token_ids"])
        return Answer(details.get("cached_tokens") or 0, output, told)

    @override
    async def reset(self) -> None:
        await self.post("/reset_prefix_cache", {})

    @override
    async def version(self) -> str:
        async with self.session.get(f"{self.address}/version") as answer:
            return str((await answer.json())["version"])


class Sglang(Engine):
    """SGLang, one rank, pages of 16."""

    @property
    @override
    def caches(self) -> bool:
        return "decode" not in self.flags  # not by default

    @override
    def __post_init__(self) -> None:
        self.name = "sglang"
        self.block_size = 16
        ports = free_ports(2)
        self.events = f"tcp://127.0.0.1:{ports}"
        self._replay = f"tcp://127.0.0.1:{ports + 1}"
        events = {
            "publisher": "zmq",
            "endpoint": self.events,
            "bind": True,
            "replay_endpoint": self._replay,
            "topic": "kv-events",
            "buffer_steps": self.replay_batches,
        }
        command = [
            *(str(self.build / "sglang-venv/bin/python"), str(HERE / "launch_sglang.py")),
            *("--model-path", str(self.build / "model"), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"),
            *("--load-format", "dummy", "--dtype", "float32"),
            *("--attention-backend", "torch_native"),
            *("--disable-overlap-schedule", "--disable-cuda-graph"),
            *("--page-size", str(self.block_size)),
            *("--max-total-tokens", str(self.blocks * self.block_size)),
            *("--max-running-requests", str(SLOTS)),
            *("--enable-metrics", "--enable-cache-report"),
            *("--kv-events-config", json.dumps(events)),
            *self.flags,
        ]
        variables = {
            **_OFFLINE,
            "SGL_STUB": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "SGLANG_USE_CPU_ENGINE": "1",
            **self.variables,
        }
        self.child = Child(self.worker_id, command, self.logs, variables)

    @override
    def relay_flags(self) -> Sequence[str]:
        return [
            *("--worker-id", self.worker_id, "--engine", self.name, "--address", self.address),
            *("--events", self.events, "--replay", self._replay, "--topic", "kv-events"),
            *self.told,
        ]

    @override
    async def ask(
        self, prompt: Prompt, headers: Mapping[str, str], more: Mapping[str, Any] = NOTHING
    ) -> Answer:
        body: dict[str, object] = {
            "input_ids": list(prompt.tokens),
            "sampling_params": {
                "max_new_tokens": prompt.output_tokens,
                "temperature": 0 if prompt.copies == 1 else 1,
                "ignore_eos": True,
                "n": prompt.copies,
            },
        }
        if prompt.salt:
            body["cache_salt"] = prompt.salt
        if prompt.logprobs:
            body |= {"return_logprob": True, "logprob_start_len": 0}
        told = json.loads(await self.post("/generate", body | dict(more), headers))
        if isinstance(told, list):
            told = told[0]
        return Answer(told["meta_info"]["cached_tokens"], tuple(told["output_ids"]), told)

    @override
    async def reset(self) -> None:
        await self.post("/flush_cache", {})

    @override
    async def version(self) -> str:
        async with self.session.get(f"{self.address}/server_info") as answer:
            return str((await answer.json())["version"])
