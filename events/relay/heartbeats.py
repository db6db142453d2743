"""The heartbeats of one engine's ranks: identity, load, warnings.

A heartbeat is made of the settings, the engine's pages and the rank's state.

Law: a heartbeat that routers can't read is never sent; a bare heartbeat is sent instead.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from events.engines.events import LoadSample
from events.engines.table import engine_of
from events.plane.facts import Heartbeat, encode_heartbeat
from events.plane.settings import EngineSettings
from events.plane.supervisor import Supervisor
from events.relay.engine_pages import HEALTH_S, EnginePages
from events.relay.ledger import canonical_block_size
from events.relay.rank_shell import RankShell

RELAY_FAILING = "relay_failing"
"""Warning code: work of the relay fails, and is retried."""
RANKS = "ranks"
"""Warning code: the engine's data-parallel ranks are not as configured."""
WARNINGS_MAX = 64
WARNING_CHARS_MAX = 300
"""Characters of a warning."""
BLOCKS_MAX = 1e9
"""Canonical blocks of a rank; same bound as in heartbeats (events/plane/facts.py)."""


class Heartbeats:
    """The heartbeats of one engine's ranks."""

    def __init__(
        self,
        settings: EngineSettings,
        pages: EnginePages,
        supervisors: Sequence[Supervisor],
        counts: Counter[str],
    ) -> None:
        """supervisors: of the relay's work for all ranks. counts: of `implausible_load`."""
        self._settings = settings
        self._pages = pages
        self._supervisors = supervisors
        self._counts = counts

    def encoded(self, shell: RankShell, now_s: float) -> bytes:
        """A heartbeat; a bare heartbeat if routers can't read the whole; empty if both fail."""
        try:
            return encode_heartbeat(self.heartbeat(shell, now_s))
        except Exception as error:  # beats go on, whatever the engine's answers
            shell.supervisor.failed("heartbeat", error)
        try:
            return encode_heartbeat(self._bare_heartbeat(shell, now_s))
        except Exception as error:
            shell.supervisor.failed("heartbeat", error)
        return b""

    def engine_block_size(self, shell: RankShell) -> int | None:
        """Tokens in a block of the engine; None until its events or pages have the size."""
        size = shell.rank.ledger.engine_block_size
        if size is None and shell.load is not None:
            size = shell.load.block_size
        return self._pages.identity.block_size if size is None else size

    def heartbeat(self, shell: RankShell, now_s: float) -> Heartbeat:
        """The whole heartbeat of a rank; unexpected values may make it raise."""
        settings = self._settings
        identity = self._pages.identity
        load = shell.load or LoadSample()
        engine_size = self.engine_block_size(shell)
        size = canonical_block_size(engine_size, settings.block_size) if engine_size else None
        scale = engine_size / size if engine_size and size else 0.0
        used = None if load.used_blocks is None else self._canonical(load.used_blocks, scale)
        blocks = settings.total_blocks or load.total_blocks or identity.total_blocks or 0
        total = self._canonical(blocks, scale)
        priority = settings.priority_scheduling or bool(identity.priority_scheduling)
        engine, lower_first = engine_of(settings.engine), identity.low_priority_first
        if lower_first is None:
            lower_first = engine.lower_priority_first
        coded, plain = self._coded_warnings(shell), self._warnings(shell, engine_size)
        is_healthy = self._pages.is_healthy(now_s)
        has_own = is_healthy and now_s - shell.own_numbers_at_s < HEALTH_S
        return Heartbeat(
            epoch=shell.rank.outbox.epoch,
            address=settings.address,
            engine=settings.engine,
            engine_version=identity.version or "",
            model=settings.model or load.model or identity.model or "",
            model_aliases=tuple(dict.fromkeys((*settings.model_aliases, *identity.aliases))),
            lora_names=identity.lora_names,
            loads_loras=settings.loads_loras,
            max_model_len=identity.max_model_len or 0,
            block_size=size or 0,
            engine_block_size=engine_size or 0,
            role=settings.role or identity.role or "both",
            kv_connector=settings.kv_connector,
            kv_engine_id=self._kv_engine_id(shell),
            bootstrap_host=settings.bootstrap_host,
            bootstrap_port=settings.bootstrap_port or identity.bootstrap_port or 0,
            labels=settings.labels,
            multi_rank=settings.ranks > 1,
            priority_scheduling=("lower" if lower_first else "higher") if priority else "",
            healthy=is_healthy and not load.asleep,
            asleep=load.asleep and is_healthy,
            probed=self._pages.probed,
            events=settings.events is not None,
            tells_salts=engine.tells_salts(identity.version or ""),
            warms=shell.warmer is not None,
            running=load.running,
            waiting=load.waiting,
            used_blocks=used,
            total_blocks=int(total) if total else None,
            total_slots=settings.slots or load.total_slots or identity.total_slots,
            token_budget=identity.token_budget,
            preemptions=load.preemptions,
            numbers=load.numbers,
            own_numbers=shell.own_numbers if has_own else {},
            sampled_at_s=shell.sampled_at_s,
            sent_at_s=now_s,
            warnings=_bounded((*(sentence for _, sentence in coded), *plain)),
            warning_codes=_bounded(code for code, _ in coded),
        )

    def _bare_heartbeat(self, shell: RankShell, now_s: float) -> Heartbeat:
        """A heartbeat without the engine's values and most settings: routers show the worker with
        its warnings, and send it no requests."""
        coded = self._coded_warnings(shell)
        return Heartbeat(
            epoch=shell.rank.outbox.epoch,
            address=self._settings.address,
            engine=self._settings.engine,
            multi_rank=self._settings.ranks > 1,
            healthy=False,
            events=self._settings.events is not None,
            sent_at_s=now_s,
            warnings=_bounded(sentence for _, sentence in coded),
            warning_codes=_bounded(code for code, _ in coded),
        )

    def _canonical(self, blocks: float, scale: float) -> float | None:
        """blocks * scale, in canonical blocks; None, counted, for more than BLOCKS_MAX."""
        if blocks * scale <= BLOCKS_MAX:
            return blocks * scale
        self._counts["implausible_load"] += 1
        return None

    def _kv_engine_id(self, shell: RankShell) -> str:
        """vLLM's name of a rank for KV transfers; empty: unknown.

        vLLM adds its own number of a rank to a configured name. Mooncake's bootstrap server numbers
        the ranks of a node of a group from 0 on, and of other engines as the engine does.
        """
        settings, rank = self._settings, shell.key.dp_rank
        configured = settings.kv_engine_id
        if configured and (settings.ranks > 1 or settings.first_rank):
            configured += f"_dp{shell.number}"
        ids = self._pages.identity.kv_engine_ids
        if settings.first_rank and min(ids, default=0) == settings.first_rank:
            rank = shell.number
        return ids.get(rank) or configured

    def _coded_warnings(self, shell: RankShell) -> list[tuple[str, str]]:
        """(code, sentence) of warnings with a code of their own in
        router/fleet/health/warnings.py."""
        troubles = dict[str, str]()
        for supervisor in (*self._supervisors, shell.supervisor):
            troubles |= supervisor.troubles()
        coded = [
            (RELAY_FAILING, f"its relay fails at {work}, and retries: {error}")
            for work, error in sorted(troubles.items())
        ]
        if ranks := self._ranks_mismatch(shell):
            coded.append((RANKS, ranks))
        return coded

    def _ranks_mismatch(self, shell: RankShell) -> str:
        """Why the configured ranks can't be the engine's; empty: they can."""
        configured = self._settings.ranks
        engine_ranks = self._pages.dp_ranks
        if engine_ranks is not None and engine_ranks != configured:
            return (
                f"its engine has {engine_ranks} data-parallel ranks, but its relay is configured"
                f" with ranks: {configured}; set ranks to the engine's number"
            )
        first, rank = self._settings.first_rank, shell.key.dp_rank
        numbers = self._pages.rank_numbers
        if len(numbers) == configured > 1 and min(numbers) != first:
            return (
                f"its engine numbers its ranks from {min(numbers)} on, and first_rank is {first}: a"
                " node of vLLM's hybrid load balancing has first_rank set to its"
                " --data-parallel-start-rank"
            )
        engine_rank = shell.rank.engine_rank
        # A single rank may be an engine of its own behind another balancer.
        numbered = engine_of(self._settings.engine).ranks_numbered
        unnumbered = configured == 1 or (engine_rank == 0 and not numbered)
        if engine_rank is not None and engine_rank != shell.number and not unnumbered:
            return (
                f"the KV events at the endpoint of rank {rank} are those of the engine's rank"
                f" {engine_rank}, not {shell.number}: set events and replay to the endpoints of the"
                " engine's rank 0"
            )
        return ""

    def _warnings(self, shell: RankShell, engine_size: int | None) -> list[str]:
        """Faults that an operator can fix, a sentence each."""
        warnings = []
        dropped = shell.rank.counts
        if dropped["block_size_unsuitable"]:
            warnings.append(
                f"blocks of {engine_size} tokens can't be split or merged to"
                f" {self._settings.block_size}: no block of this worker is indexed; set block_size"
                f" to a multiple of {engine_size}"
            )
        if dropped["unnamed_lora"]:
            warnings.append(
                "the engine's events have only numbers of LoRAs: their blocks are not indexed"
            )
        if dropped["unknown_medium"]:
            warnings.append("the engine's events name a medium that kvroute doesn't know")
        if dropped["malformed"]:
            warnings.append("the engine sends events that kvroute can't read")
        if (
            self._settings.mooncake is not None
            and self._settings.role != "decode"
            and not self._kv_engine_id(shell)
        ):
            warnings.append(
                f"{self._settings.mooncake} doesn't return Mooncake's engine_id, and none is"
                " configured: this worker transfers no KV caches"
            )
        if self._pages.trouble:
            warnings.append(f"the engine's HTTP: {self._pages.trouble}")
        return warnings


def _bounded(texts: Iterable[str]) -> tuple[str, ...]:
    """Warnings cut to the number and length of a heartbeat, without lone surrogates."""
    return tuple(
        text[:WARNING_CHARS_MAX].encode("utf-8", "replace").decode()
        for text in islice(texts, WARNINGS_MAX)
    )
