"""Reads what engines tell about their load, and about themselves, into one form. Pure.

    vLLM    GET /metrics                         vllm_loads
    SGLang  GET /v1/loads (JSON, fresh)          sglang_loads
            LoadStat over ZMQ (fresh)            sglang_load_stat
            GET /metrics (up to 30 s old)        sglang_metrics
    both    /v1/models and what is near it       vllm_identity, sglang_identity
    vLLM    /query of Mooncake's bootstrap       mooncake_engine_ids

Law: a document is read whole or raises LoadUnreadable, whose reason is a sentence; whatever is
read fits a heartbeat. Time and memory are linear in the document's size.

Blocks and block sizes are the engine's own. Engines count blocks *held by requests*: cache that
nobody uses any more is free to them, and in none of these numbers.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from events.engines.events import LoadSample

DOCUMENT_BYTES_MAX = 16 << 20
"""The largest page seen is 118 KiB, for two ranks."""

COUNT_MAX = (1 << 31) - 1
"""Of requests, blocks, tokens held: the most that a heartbeat takes (events/plane/facts.py)."""
BLOCK_SIZE_MAX = 1 << 20
"""Tokens a block, as in the events (events/engines/wire.py)."""
COUNTER_MAX = 1 << 53
"""Of tokens since an engine's start: a float shows each number up to it."""
SHARE_MAX = 100.0
"""Of a share in use, which is 1 or hardly more."""
UNIX_SECONDS_MAX = 1e11
"""As in events/plane/facts.py: a time that a calendar can show."""
LINES_MAX = 1 << 14
"""Wanted lines of a metrics page: 1,024 ranks with some 16 each."""

REASON_CHARS = 200

_READ_ERRORS = (ValueError, OverflowError, RecursionError)
"""All that msgspec raises for documents it can't read."""

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
TokenCounter = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
Signed = Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
"""Engines write -1 for what they don't limit."""

Document = TypeVar("Document")
Number = TypeVar("Number", int, float)


class LoadUnreadable(ValueError):
    """A document that can't be used; nothing of it was."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:REASON_CHARS])
        self.reason = reason[:REASON_CHARS]


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine says it is. None: this engine doesn't tell."""

    model: str | None = None
    """The name requests use."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""
    lora_names: tuple[str, ...] = ()
    """Adapters loaded now."""
    max_model_len: int | None = None
    """Prompt and output together, tokens."""
    version: str | None = None
    block_size: int | None = None
    """Tokens a block, as in the events."""
    total_blocks: int | None = None
    """Of one rank."""
    total_slots: int | None = None
    """Requests that one rank runs at once."""
    token_budget: int | None = None
    """Tokens that one rank computes in a step at most."""
    dp_ranks: int | None = None
    priority_scheduling: bool | None = None
    low_priority_first: bool | None = None
    """Whether a lower number is served sooner, when priority_scheduling."""
    role: str | None = None
    """prefill or decode, if it serves half of each request."""
    bootstrap_port: int | None = None
    """Where decode engines find a prefill engine."""
    kv_engine_ids: Mapping[int, str] = field(default_factory=dict)
    """Of each rank, the name that vLLM's decode engines need to fetch from it by Mooncake."""


# vLLM


_VLLM_NAMES = (
    "process_start_time_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # up to 0.11
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",  # up to 0.11
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",  # up to 0.11
    "vllm:cache_config_info",
    "vllm:engine_sleep_state",
)


def vllm_loads(text: str) -> dict[int, LoadSample]:
    """Load by rank (label `engine`; absent means 0) from vLLM's /metrics, 0.9 and later.

        total_blocks = the rank's blocks - 1      vLLM keeps one, its null block, for itself
        used_blocks  = usage * total_blocks

    The rank's blocks are kv_cache_size_tokens / block_size. Older releases have num_gpu_blocks
    alone, which is the sum over the engines behind the page, so it is divided by their number.
    total_slots is not in there; see vllm_identity. Extras: prefix_hit_tokens and
    prefix_query_tokens (since its start) and asleep (1 or 0), as far as told. Raises
    LoadUnreadable.
    """
    page = _Page(text, _VLLM_NAMES)
    start_s = page.start_s()
    capacities = _vllm_capacities(page)
    loads: dict[int, LoadSample] = {}
    for rank, running in page.by_rank("vllm:num_requests_running", "engine").items():
        load = LoadSample(
            running=_whole(running), model=running.labels.get("model_name"), process_start_s=start_s
        )
        load.block_size, load.total_blocks = capacities.get(rank, (None, None))
        loads[rank] = load
    if not loads:
        raise LoadUnreadable("no vllm:num_requests_running on the page")
    for rank, load in loads.items():
        waiting = page.rank_sample(rank, "engine", "vllm:num_requests_waiting")
        if waiting is None:
            raise LoadUnreadable(f"rank {rank} has no vllm:num_requests_waiting")
        load.waiting = _whole(waiting)
        usage = page.rank_sample(
            rank, "engine", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
        )
        if usage is not None and load.total_blocks is not None:
            load.used_blocks = _share(usage) * load.total_blocks
        if preemptions := page.rank_sample(rank, "engine", "vllm:num_preemptions_total"):
            load.preemptions = _whole(preemptions)
        for extra, names in (
            (
                "prefix_hit_tokens",
                ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            ),
            (
                "prefix_query_tokens",
                ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            ),
        ):
            if sample := page.rank_sample(rank, "engine", *names):
                load.extras[extra] = float(_whole(sample, COUNTER_MAX))
    for sample in page.samples("vllm:engine_sleep_state"):
        rank = _rank(sample, "engine")
        if sample.labels.get("sleep_state") == "awake" and rank in loads:
            loads[rank].extras["asleep"] = 0.0 if sample.value else 1.0
    return loads


def _vllm_capacities(page: "_Page") -> dict[int, tuple[int | None, int | None]]:
    """Rank -> (block size, blocks that requests can hold)."""
    infos = page.by_rank("vllm:cache_config_info", "engine")
    capacities: dict[int, tuple[int | None, int | None]] = {}
    for rank, info in infos.items():
        labels = info.labels
        # With context parallelism a block of the events spans several of the cache's; 0.32 says so.
        block_size = _positive(labels.get("effective_attention_block_size")) or _positive(
            labels.get("block_size")
        )
        tokens = _positive(labels.get("kv_cache_size_tokens"))
        blocks = _positive(labels.get("num_gpu_blocks"))
        if tokens is not None and block_size is not None:
            blocks = tokens // block_size
        elif blocks is not None:
            blocks //= len(infos)
        if max(blocks or 0, block_size or 0) > COUNT_MAX or (block_size or 0) > BLOCK_SIZE_MAX:
            raise LoadUnreadable(f"rank {rank} has {blocks} blocks of {block_size} tokens")
        capacities[rank] = (block_size, None if blocks is None else max(blocks - 1, 0))
    return capacities


class _ModelCard(Struct):
    id: str
    parent: str | None = None
    max_model_len: Signed | None = None


class _Models(Struct):
    data: list[_ModelCard]


class _Version(Struct):
    version: str


def vllm_identity(
    models: bytes | str,
    version: bytes | str | None = None,
    event_sources: bytes | str | None = None,
    server_info: bytes | str | None = None,
) -> EngineIdentity:
    """From /v1/models, and if at hand /version, /kv_event_sources (0.31 and later), and
    /server_info?config_format=json, which only the development mode has.

    Raises LoadUnreadable.
    """
    model, aliases, lora_names, max_model_len = _read_models(models)
    ranks = (
        None
        if event_sources is None
        else len(_json(event_sources, _EVENT_SOURCES, "/kv_event_sources"))
    )
    scheduler = {} if server_info is None else _vllm_scheduler(server_info)
    return EngineIdentity(
        model=model,
        aliases=aliases,
        lora_names=lora_names,
        max_model_len=_natural(max_model_len),
        total_slots=_count(scheduler.get("max_num_seqs")),
        token_budget=_count(scheduler.get("max_num_batched_tokens")),
        version=None if version is None else _json(version, _VERSION, "/version").version,
        dp_ranks=ranks or None,
    )


def _vllm_scheduler(server_info: bytes | str) -> Mapping[str, object]:
    """What is configured of the scheduler; empty where the page has it as text.

    The page is for people and differs between releases: all that may be used of it is looked at
    one by one, so that no other part of it makes an engine unreadable.
    """
    told = _json(server_info, _VLLM_SERVER_INFO, "/server_info").vllm_config
    scheduler = told.get("scheduler_config") if isinstance(told, dict) else None
    return scheduler if isinstance(scheduler, dict) else {}


class _VllmServerInfo(Struct):
    vllm_config: object = None


class _MooncakeEngine(Struct):
    engine_id: str


def mooncake_engine_ids(document: bytes | str) -> dict[int, str]:
    """From /query of the bootstrap server of vLLM's MooncakeConnector: rank -> engine_id, which is
    another one in each of the engine's lives unless it is configured. Raises LoadUnreadable."""
    told = _json(document, _MOONCAKE_ENGINES, "/query")
    return {rank: engine.engine_id for rank, engine in told.items()}


# SGLang


class _SglangLoad(Struct):
    num_running_reqs: Count
    num_waiting_reqs: Count
    dp_rank: Count | None = None
    num_used_tokens: Count | None = None
    max_total_num_tokens: Count | None = None
    max_running_requests: Count | None = None
    num_waiting_uncached_tokens: TokenCounter | None = None
    cache_hit_rate: float | None = None


class _SglangLoads(Struct):
    loads: list[_SglangLoad]


def sglang_loads(document: bytes | str, page_size: int) -> dict[int, LoadSample]:
    """Load by rank from SGLang's /v1/loads; tokens are made blocks of `page_size` tokens.

    Preemptions and the process's start are not in there. Extras: cache_hit_rate of the last
    interval. Raises LoadUnreadable.
    """
    loads: dict[int, LoadSample] = {}
    for told in _json(document, _SGLANG_LOADS, "/v1/loads").loads:
        load = LoadSample(
            running=told.num_running_reqs,
            waiting=told.num_waiting_reqs,
            total_slots=told.max_running_requests or None,
            waiting_prefill_tokens=told.num_waiting_uncached_tokens,
        )
        _set_blocks(load, page_size, told.num_used_tokens, told.max_total_num_tokens)
        if told.cache_hit_rate is not None:
            load.extras["cache_hit_rate"] = told.cache_hit_rate
        loads[told.dp_rank or 0] = load
    if not loads:
        raise LoadUnreadable("/v1/loads names no rank")
    return loads


class _LoadStat(Struct, array_like=True, tag="LoadStat"):
    num_running: Count
    num_waiting: Count
    num_tokens_used: Count
    max_total_num_tokens: Count
    dp_rank: Count | None  # the last of the older form
    num_waiting_uncached_tokens: TokenCounter | None = None
    num_total_tokens: TokenCounter | None = None
    max_running_requests: Count | None = None


def sglang_load_stat(payload: bytes, page_size: int) -> tuple[int, LoadSample]:
    """(rank, load) from one payload of SGLang's LoadStat feed; as sglang_loads otherwise.

    num_total_tokens, which also counts what waits, is left aside. Raises LoadUnreadable.
    """
    if len(payload) > DOCUMENT_BYTES_MAX:
        raise LoadUnreadable(f"a LoadStat of {len(payload)} bytes")
    try:
        stat = _LOAD_STAT.decode(payload)
    except _READ_ERRORS as error:
        raise LoadUnreadable(f"LoadStat: {error}") from None
    load = LoadSample(
        running=stat.num_running,
        waiting=stat.num_waiting,
        total_slots=stat.max_running_requests or None,
        waiting_prefill_tokens=stat.num_waiting_uncached_tokens,
    )
    _set_blocks(load, page_size, stat.num_tokens_used, stat.max_total_num_tokens)
    return stat.dp_rank or 0, load


_SGLANG_WAITING = (
    "sglang:num_queue_reqs",
    "sglang:num_grammar_queue_reqs",
    # Prefill/decode roles only: before a slot, or before its KV has come.
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
_SGLANG_NAMES = (
    "process_start_time_seconds",
    "sglang:num_running_reqs",
    *_SGLANG_WAITING,
    "sglang:num_used_tokens",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
    "sglang:max_running_requests",
    "sglang:page_size",
    "sglang:num_retracted_requests_total",
    "sglang:cache_hit_rate",
)


def sglang_metrics(text: str, page_size: int | None = None) -> dict[int, LoadSample]:
    """Load by rank (label `dp_rank`; absent means 0) from SGLang's /metrics, for want of better.

    With priority scheduling every gauge comes once more for each priority; only priority="" counts,
    which has them all. `page_size` is used where the page has none (before 0.5.15). The gauges are
    renewed every 40 decode steps, or 30 s when idle. Raises LoadUnreadable.
    """
    page = _Page(text, _SGLANG_NAMES)
    start_s = page.start_s()
    loads: dict[int, LoadSample] = {}
    for rank, running in page.by_rank("sglang:num_running_reqs", "dp_rank").items():

        def told(name: str, rank: int = rank) -> Sample | None:
            return page.rank_sample(rank, "dp_rank", name)

        queues = [told(name) for name in _SGLANG_WAITING]
        if queues[0] is None:
            raise LoadUnreadable(f"rank {rank} has no {_SGLANG_WAITING[0]}")
        load = LoadSample(
            running=_whole(running),
            waiting=_bounded(
                "all queues", sum(_whole(queue) for queue in queues if queue is not None)
            ),
            model=running.labels.get("model_name"),
            process_start_s=start_s,
        )
        if slots := told("sglang:max_running_requests"):
            load.total_slots = _whole(slots) or None
        if retracted := told("sglang:num_retracted_requests_total"):
            load.preemptions = _whole(retracted)
        if hit_rate := told("sglang:cache_hit_rate"):
            load.extras["cache_hit_rate"] = _share(hit_rate)
        tokens_a_page = told("sglang:page_size")
        size = page_size if tokens_a_page is None else _whole(tokens_a_page)
        total = told("sglang:max_total_num_tokens")
        used = told("sglang:num_used_tokens")
        usage = told("sglang:token_usage")
        if size:
            total_tokens = None if total is None else _whole(total)
            used_tokens: float | None = None
            if used is not None:
                used_tokens = _whole(used)
            elif usage is not None and total_tokens is not None:
                used_tokens = _share(usage) * total_tokens
            _set_blocks(load, size, used_tokens, total_tokens)
        loads[rank] = load
    if not loads:
        raise LoadUnreadable("no sglang:num_running_reqs on the page")
    return loads


class _SglangState(Struct):
    effective_max_running_requests_per_dp: Signed | None = None


class _SglangEvents(Struct):
    block_size: Signed | None = None


class _ServerInfo(Struct):
    """Of some 550 entries, which hold every argument of the server, the ones that matter."""

    version: str | None = None
    served_model_name: str | None = None
    model_path: str | None = None
    page_size: Signed | None = None
    dp_size: Signed | None = None
    max_total_num_tokens: Signed | None = None
    max_running_requests: Signed | None = None
    context_length: Signed | None = None
    chunked_prefill_size: Signed | None = None
    max_prefill_tokens: Signed | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    kv_events: _SglangEvents | None = None
    internal_states: list[_SglangState] = []
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: Annotated[int, Meta(ge=0, le=65535)] | None = None


class _ModelInfo(Struct):
    served_model_name: str | None = None
    model_path: str | None = None


def sglang_identity(
    server_info: bytes | str,
    models: bytes | str | None = None,
    model_info: bytes | str | None = None,
) -> EngineIdentity:
    """From /server_info, and if at hand /v1/models and /model_info.

    The block size is the one of the events where the engine names it: with context parallelism a
    block spans several pages. Raises LoadUnreadable.
    """
    info = _json(server_info, _SERVER_INFO, "/server_info")
    more = None if model_info is None else _json(model_info, _MODEL_INFO, "/model_info")
    model = info.served_model_name or (more and more.served_model_name)
    model = model or info.model_path or (more and more.model_path) or None
    aliases: tuple[str, ...] = ()
    lora_names: tuple[str, ...] = ()
    max_model_len = info.context_length
    if models is not None:
        name, aliases, lora_names, told_len = _read_models(models)
        model = model or name
        max_model_len = told_len or max_model_len
    ranks = info.dp_size if info.dp_size and info.dp_size > 0 else None
    slots = next(
        (state.effective_max_running_requests_per_dp for state in info.internal_states), None
    )
    if not slots and info.max_running_requests:
        slots = info.max_running_requests // (ranks or 1)
    block_size = (info.kv_events and info.kv_events.block_size) or info.page_size
    if block_size is not None and not 1 <= block_size <= BLOCK_SIZE_MAX:
        raise LoadUnreadable(f"/server_info: a page size of {block_size}")
    total_tokens = _natural(info.max_total_num_tokens)
    half = info.disaggregation_mode in ("prefill", "decode")  # "null": it serves all of them
    return EngineIdentity(
        model=model,
        aliases=aliases,
        lora_names=lora_names,
        max_model_len=_natural(max_model_len),
        version=info.version,
        block_size=block_size,
        total_blocks=total_tokens // block_size if total_tokens and block_size else None,
        total_slots=_natural(slots),
        # Without chunks, -1, the second alone bounds the prompts of a step.
        token_budget=_natural(info.chunked_prefill_size) or _natural(info.max_prefill_tokens),
        dp_ranks=ranks,
        priority_scheduling=info.enable_priority_scheduling,
        low_priority_first=info.schedule_low_priority_values_first,
        role=info.disaggregation_mode if half else None,
        bootstrap_port=info.disaggregation_bootstrap_port if half else None,
    )


# Shared


_MODELS = msgspec.json.Decoder(_Models)
_VERSION = msgspec.json.Decoder(_Version)
_EVENT_SOURCES = msgspec.json.Decoder(dict[str, Raw])
_VLLM_SERVER_INFO = msgspec.json.Decoder(_VllmServerInfo)
_MOONCAKE_ENGINES = msgspec.json.Decoder(dict[int, _MooncakeEngine])
_SGLANG_LOADS = msgspec.json.Decoder(_SglangLoads)
_SERVER_INFO = msgspec.json.Decoder(_ServerInfo)
_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_LOAD_STAT = msgspec.msgpack.Decoder(_LoadStat)


class _Page:
    """The wanted samples of a Prometheus page.

    Pages have a thousand lines and are read every second, so all lines that don't begin with a
    wanted name (or are a counter's `_created`) are dropped before anything is parsed.
    """

    def __init__(self, text: str, names: Iterable[str]) -> None:
        if len(text) > DOCUMENT_BYTES_MAX:
            raise LoadUnreadable(f"a metrics page of {len(text)} characters")
        lines = _wanted_lines(tuple(names)).findall(text)
        if len(lines) > LINES_MAX:
            raise LoadUnreadable(f"a metrics page with {len(lines)} lines about load")
        self._by_rank: dict[tuple[str, str], dict[int, Sample]] = {}
        self._samples: dict[str, list[Sample]] = {}
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    # One that is repeated for each priority is a part of the one with none.
                    if not sample.labels.get("priority"):
                        self._samples.setdefault(sample.name, []).append(sample)
        except Exception as error:  # the parser's errors for pages that are none have no base class
            raise LoadUnreadable(f"the metrics page: {error!r}") from None

    def samples(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def single(self, name: str) -> float | None:
        """The value of a name without labels, if it is there and a number."""
        samples = self.samples(name)
        # An integer of 400 digits is less than infinity, but no float.
        return samples[0].value if samples and -math.inf < samples[0].value < math.inf else None

    def start_s(self) -> float | None:
        """When the process started, Unix time."""
        start_s = self.single("process_start_time_seconds")
        if start_s is not None and not 0 <= start_s <= UNIX_SECONDS_MAX:
            raise LoadUnreadable(f"process_start_time_seconds is {start_s}")
        return start_s

    def by_rank(self, name: str, label: str) -> Mapping[int, Sample]:
        """Rank -> its largest sample: tensor-parallel peers may tell the same load each."""
        found = self._by_rank.get((name, label))
        if found is None:
            found = self._by_rank[name, label] = self._read_ranks(name, label)
        return found

    def _read_ranks(self, name: str, label: str) -> dict[int, Sample]:
        found: dict[int, Sample] = {}
        for sample in self.samples(name):
            rank = _rank(sample, label)
            if rank not in found or sample.value > found[rank].value:
                found[rank] = sample
        return found

    def rank_sample(self, rank: int, label: str, *names: str) -> Sample | None:
        """That rank's sample under the first of the names that has one."""
        return next((s for s in self._of_rank(rank, label, names)), None)

    def _of_rank(self, rank: int, label: str, names: Iterable[str]) -> Iterator[Sample]:
        for name in names:
            sample = self.by_rank(name, label).get(rank)
            if sample is not None:
                yield sample


_PATTERNS: dict[tuple[str, ...], re.Pattern[str]] = {}


def _wanted_lines(names: tuple[str, ...]) -> re.Pattern[str]:
    pattern = _PATTERNS.get(names)
    if pattern is None:
        alternatives = "|".join(re.escape(name) for name in names)
        pattern = _PATTERNS[names] = re.compile(rf"^(?:{alternatives})[{{ \t].*$", re.MULTILINE)
    return pattern


def _rank(sample: Sample, label: str) -> int:
    text = sample.labels.get(label, "0")
    rank = _positive(text)
    if rank is None and text != "0":
        raise LoadUnreadable(f'{sample.name}: {label}="{text}" is no rank')
    return rank or 0


def _whole(sample: Sample, limit: int = COUNT_MAX) -> int:
    return int(_bounded(sample.name, sample.value, limit))


def _share(sample: Sample) -> float:
    return _bounded(sample.name, sample.value, SHARE_MAX)


def _bounded(name: str, value: Number, limit: float = COUNT_MAX) -> Number:
    if not 0 <= value <= limit:  # NaN is not, either
        raise LoadUnreadable(f"{name} is {value}")
    return value


def _natural(value: int | None) -> int | None:
    """None for what isn't limited, or not told."""
    return value if value is not None and value > 0 else None


def _count(value: object) -> int | None:
    """A number of requests, blocks or tokens; None for whatever is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= COUNT_MAX else None


def _positive(text: str | None) -> int | None:
    """Info gauges carry values as text, and what Python made of None as "None"."""
    if text is None or len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None


def _set_blocks(
    load: LoadSample, page_size: int, used_tokens: float | None, total_tokens: int | None
) -> None:
    if not 1 <= page_size <= BLOCK_SIZE_MAX:
        raise LoadUnreadable(f"a page size of {page_size}")
    load.block_size = page_size
    load.used_blocks = None if used_tokens is None else used_tokens / page_size
    load.total_blocks = total_tokens // page_size if total_tokens else None


def _read_models(document: bytes | str) -> tuple[str, tuple[str, ...], tuple[str, ...], int | None]:
    """(model, its other names, LoRA adapters, max_model_len) of /v1/models.

    Adapters are the entries with a parent; the others are all names of the one model.
    """
    cards = _json(document, _MODELS, "/v1/models").data
    names = [card for card in cards if card.parent is None]
    if not names:
        raise LoadUnreadable("/v1/models names no model")
    return (
        names[0].id,
        tuple(card.id for card in names[1:]),
        tuple(card.id for card in cards if card.parent is not None),
        names[0].max_model_len,
    )


def _json(document: bytes | str, decoder: msgspec.json.Decoder[Document], what: str) -> Document:
    if len(document) > DOCUMENT_BYTES_MAX:
        raise LoadUnreadable(f"{what}: a document of {len(document)} bytes")
    try:
        return decoder.decode(document)
    except _READ_ERRORS as error:
        raise LoadUnreadable(f"{what}: {error}") from None
