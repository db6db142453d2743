"""Reads engines' documents about their load and identity into one form. Pure.

    vLLM    GET /metrics                         vllm_loads
    SGLang  GET /v1/loads (JSON, fresh)          sglang_loads
            LoadStat over ZMQ (fresh)            sglang_load_stat
            GET /metrics (up to 30 s old)        sglang_metrics
    both    /v1/models and related pages         vllm_identity, sglang_identity
    vLLM    /query of Mooncake's bootstrap       mooncake_engine_ids

Law: a document is read whole or raises LoadUnreadable, whose reason is a sentence; values that are
read fit a heartbeat. Time and memory are linear in the document's size.

Blocks and block sizes are the engine's own. Engines count blocks *held by requests*: cached blocks
of finished requests are free to them, and not in these numbers.
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
"""Bytes of a document; the largest page seen is 118 KiB, for two ranks."""

COUNT_MAX = (1 << 31) - 1
"""Requests, blocks or tokens held; same bound as in heartbeats (events/plane/facts.py)."""
BLOCK_SIZE_MAX = 1 << 20
"""Tokens of a block, as in the events (events/engines/wire.py)."""
COUNTER_MAX = 1 << 53
"""Tokens since an engine's start: a float represents every integer up to it."""
SHARE_MAX = 100.0
"""Share of blocks in use; real values are at most slightly above 1."""
UNIX_SECONDS_MAX = 1e11
"""Unix time, as in events/plane/facts.py: a time that a calendar can show."""
LINES_MAX = 1 << 14
"""Lines of a metrics page that are read: 1,024 ranks with some 16 each."""

REASON_CHARS = 200

_READ_ERRORS = (ValueError, OverflowError, RecursionError)
"""All errors of msgspec for unreadable documents."""

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
TokenCounter = Annotated[int, Meta(ge=0, le=COUNTER_MAX)]
Signed = Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
"""A count; engines write -1 for no limit."""

Document = TypeVar("Document")
Number = TypeVar("Number", int, float)


class LoadUnreadable(ValueError):
    """A document that can't be used, not even in part."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:REASON_CHARS])
        self.reason = reason[:REASON_CHARS]


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's identity and limits. None: this engine doesn't report it."""

    model: str | None = None
    """The name that requests use."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""
    lora_names: tuple[str, ...] = ()
    """Adapters loaded now."""
    max_model_len: int | None = None
    """Prompt and output together, tokens."""
    version: str | None = None
    block_size: int | None = None
    """Tokens of a block, as in the events."""
    total_blocks: int | None = None
    """KV blocks of a rank."""
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
    """Port of a prefill engine's bootstrap server."""
    kv_engine_ids: Mapping[int, str] = field(default_factory=dict)
    """Rank -> engine_id, which vLLM's decode engines need to fetch from it by Mooncake."""


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

        total_blocks = the rank's blocks - 1      vLLM reserves its null block
        used_blocks  = usage * total_blocks

    The rank's blocks are kv_cache_size_tokens / block_size. Older releases have num_gpu_blocks
    alone, the sum over the engines behind the page, which is divided by their number. total_slots
    is not on the page; see vllm_identity. Extras, if on the page: prefix_hit_tokens and
    prefix_query_tokens (since its start), and asleep (1 or 0). Raises LoadUnreadable.
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
        # With context parallelism, a block of the events spans several cache blocks; 0.32 has the
        # effective size.
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
    """Identity from /v1/models, and, if available, /version, /kv_event_sources (0.31 and later),
    and /server_info?config_format=json, which only the development mode has.

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
    """The scheduler's configuration; empty if the page has it as text.

    The page is for people and differs between releases: each used value is checked by itself, so
    that no other part of the page makes an engine unreadable.
    """
    config = _json(server_info, _VLLM_SERVER_INFO, "/server_info").vllm_config
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    return scheduler if isinstance(scheduler, dict) else {}


class _VllmServerInfo(Struct):
    vllm_config: object = None


class _MooncakeEngine(Struct):
    engine_id: str


def mooncake_engine_ids(document: bytes | str) -> dict[int, str]:
    """Rank -> engine_id, from /query of the bootstrap server of vLLM's MooncakeConnector. The id
    changes with each start of the engine unless it is configured. Raises LoadUnreadable."""
    engines = _json(document, _MOONCAKE_ENGINES, "/query")
    return {rank: engine.engine_id for rank, engine in engines.items()}


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
    """Load by rank from SGLang's /v1/loads; tokens are converted to blocks of `page_size` tokens.

    Preemptions and the process's start are not on the page. Extras: cache_hit_rate of the last
    interval. Raises LoadUnreadable.
    """
    loads: dict[int, LoadSample] = {}
    for row in _json(document, _SGLANG_LOADS, "/v1/loads").loads:
        load = LoadSample(
            running=row.num_running_reqs,
            waiting=row.num_waiting_reqs,
            total_slots=row.max_running_requests or None,
            waiting_prefill_tokens=row.num_waiting_uncached_tokens,
        )
        _set_blocks(load, page_size, row.num_used_tokens, row.max_total_num_tokens)
        if row.cache_hit_rate is not None:
            load.extras["cache_hit_rate"] = row.cache_hit_rate
        loads[row.dp_rank or 0] = load
    if not loads:
        raise LoadUnreadable("/v1/loads names no rank")
    return loads


class _LoadStat(Struct, array_like=True, tag="LoadStat"):
    num_running: Count
    num_waiting: Count
    num_tokens_used: Count
    max_total_num_tokens: Count
    dp_rank: Count | None  # last field of the older form
    num_waiting_uncached_tokens: TokenCounter | None = None
    num_total_tokens: TokenCounter | None = None
    max_running_requests: Count | None = None


def sglang_load_stat(payload: bytes, page_size: int) -> tuple[int, LoadSample]:
    """(rank, load) from one payload of SGLang's LoadStat feed; as sglang_loads otherwise.

    num_total_tokens also counts waiting requests and is not used. Raises LoadUnreadable.
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
    # Prefill/decode roles only: before a slot, or before the KV cache has come.
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
    """Load by rank (label `dp_rank`; absent means 0) from SGLang's /metrics, for older releases.

    With priority scheduling every gauge appears once more for each priority; only priority="",
    their total, counts. `page_size` is used if the page has none (before 0.5.15). The gauges are
    updated every 40 decode steps, or after 30 s when idle. Raises LoadUnreadable.
    """
    page = _Page(text, _SGLANG_NAMES)
    start_s = page.start_s()
    loads: dict[int, LoadSample] = {}
    for rank, running in page.by_rank("sglang:num_running_reqs", "dp_rank").items():

        def sample(name: str, rank: int = rank) -> Sample | None:
            return page.rank_sample(rank, "dp_rank", name)

        queues = [sample(name) for name in _SGLANG_WAITING]
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
        if slots := sample("sglang:max_running_requests"):
            load.total_slots = _whole(slots) or None
        if retracted := sample("sglang:num_retracted_requests_total"):
            load.preemptions = _whole(retracted)
        if hit_rate := sample("sglang:cache_hit_rate"):
            load.extras["cache_hit_rate"] = _share(hit_rate)
        tokens_a_page = sample("sglang:page_size")
        size = page_size if tokens_a_page is None else _whole(tokens_a_page)
        total = sample("sglang:max_total_num_tokens")
        used = sample("sglang:num_used_tokens")
        usage = sample("sglang:token_usage")
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
    """The used entries of some 550, which have every argument of the server."""

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
    """Identity from /server_info, and, if available, /v1/models and /model_info.

    The block size is that of the events if the engine reports it: with context parallelism a block
    spans several pages. Raises LoadUnreadable.
    """
    info = _json(server_info, _SERVER_INFO, "/server_info")
    more = None if model_info is None else _json(model_info, _MODEL_INFO, "/model_info")
    model = info.served_model_name or (more and more.served_model_name)
    model = model or info.model_path or (more and more.model_path) or None
    aliases: tuple[str, ...] = ()
    lora_names: tuple[str, ...] = ()
    max_model_len = info.context_length
    if models is not None:
        name, aliases, lora_names, listed_len = _read_models(models)
        model = model or name
        max_model_len = listed_len or max_model_len
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
    half = info.disaggregation_mode in ("prefill", "decode")  # "null": it serves whole requests
    return EngineIdentity(
        model=model,
        aliases=aliases,
        lora_names=lora_names,
        max_model_len=_natural(max_model_len),
        version=info.version,
        block_size=block_size,
        total_blocks=total_tokens // block_size if total_tokens and block_size else None,
        total_slots=_natural(slots),
        # Without chunks (-1), max_prefill_tokens bounds the prompts of a step.
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
    """The samples with these names on a Prometheus page.

    Pages have a thousand lines and are read every second, so lines with other names, and a
    counter's `_created`, are dropped before parsing.
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
                    # A sample with a priority is part of the sample without.
                    if not sample.labels.get("priority"):
                        self._samples.setdefault(sample.name, []).append(sample)
        except Exception as error:  # the parser's errors have no common base class
            raise LoadUnreadable(f"the metrics page: {error!r}") from None

    def samples(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def single(self, name: str) -> float | None:
        """The finite value of a name without labels; None: absent or not finite."""
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
        """Rank -> its largest sample: tensor-parallel peers may each report the same load."""
        ranks = self._by_rank.get((name, label))
        if ranks is None:
            ranks = self._by_rank[name, label] = self._read_ranks(name, label)
        return ranks

    def _read_ranks(self, name: str, label: str) -> dict[int, Sample]:
        ranks: dict[int, Sample] = {}
        for sample in self.samples(name):
            rank = _rank(sample, label)
            if rank not in ranks or sample.value > ranks[rank].value:
                ranks[rank] = sample
        return ranks

    def rank_sample(self, rank: int, label: str, *names: str) -> Sample | None:
        """The rank's sample under the first of the names that has a sample."""
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
    """The value if it is positive; None: no limit, or absent."""
    return value if value is not None and value > 0 else None


def _count(value: object) -> int | None:
    """A positive number of requests, blocks or tokens; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= COUNT_MAX else None


def _positive(text: str | None) -> int | None:
    """The number in a label of an info gauge; None for "None" and other texts."""
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

    Adapters are the entries with a parent; all other entries are names of the same model.
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
