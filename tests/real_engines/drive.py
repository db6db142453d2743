"""Sends requests where the router says, compares, and breaks things in between."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp

from kvroute.client import KvRouteError
from kvroute.v1 import WorkerStatus
from tests.real_engines import evidence
from tests.real_engines.engines import LORA, MODEL, MODEL_LEN, Answer, EngineRefused, Prompt
from tests.real_engines.processes import Child
from tests.real_engines.stage import Stage
from tests.real_engines.verdicts import Judge, Sample, Worker

SETTLE_S = 4.0
"""How long the facts of a request may take to the router before we go on without them."""
STABLE_S = 0.06
"""No fact for so long: all have come."""
JUST_BEFORE_S = 1.0
BURST_WIDTH = 12
LOAD_WIDTH = 6
VOCABULARY = range(3, 1000)
DUMPS_MAX = 10
NO_TROUBLE = 'kind="Blocks'
"""Events that a relay knows are no trouble."""

log = logging.getLogger("real_engines")


@dataclass
class _Rank:
    """Requests on a rank, to know who met whom."""

    active: int = 0
    begun: int = 0
    ended_at_s: float = -1e9


@dataclass
class Driver:
    """One client of the fleet."""

    stage: Stage
    judge: Judge
    rng: random.Random
    recoveries: list[dict[str, object]] = field(default_factory=list)
    unsettled: int = 0
    """Requests whose facts didn't come in time."""
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> what was counted by its end."""
    _ranks: dict[Worker, _Rank] = field(default_factory=dict)
    _dumps: int = 0
    pool: list[tuple[int, ...]] = field(default_factory=list)
    """Prompts that come again and again, more than fit."""

    def __post_init__(self) -> None:
        self.pool = [self.tokens(self.rng.randrange(100, 260)) for _ in range(24)]

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random token ids."""
        return tuple(self.rng.choices(VOCABULARY, k=count))

    async def serve(
        self, phase: str, prompt: Prompt, *, quiet: bool = True, to: Sequence[str] = ()
    ) -> Answer:
        """One request from route to report, compared. quiet: waits until its facts are in."""
        client = self.stage.client
        async with client.request(
            token_ids=prompt.tokens,
            model=MODEL,
            lora_name=prompt.lora,
            cache_salt=prompt.salt,
            expected_output_tokens=prompt.output_tokens,
            allowed_worker_ids=to,
            timeout_s=20.0,
        ) as request:
            pick = request.pick
            engine = self.stage.engines[pick.worker_id]
            worker = (pick.worker_id, pick.dp_rank or 0)
            rank = self._ranks.setdefault(worker, _Rank())
            companions = rank.active
            if time.monotonic() - rank.ended_at_s < JUST_BEFORE_S:
                companions += 1
            rank.active += 1
            rank.begun += 1
            begun = rank.begun
            try:
                answer = await engine.ask(prompt, pick.headers)
            finally:
                rank.active -= 1
                rank.ended_at_s = time.monotonic()
            companions += rank.begun - begun
            request.output_tokens = len(answer.output)
            request.cached_tokens = answer.cached_tokens
        row = pick.receipt.picked
        sample = self.judge.judge(
            Sample(
                phase=phase,
                quiet=quiet,
                prompt=prompt,
                worker=worker,
                engine=engine.name,
                block_size=engine.block_size,
                predicted=pick.overlap_tokens.usable,
                reported=answer.cached_tokens,
                stream_state=row.stream_state,
                stream_complete=row.stream_complete,
                companions=0 if quiet else companions,
            )
        )
        if sample.verdict != "exact":
            log.info(
                "%s: %s/%d predicted %d reported %d of %d: %s", phase, *worker, sample.predicted,
                sample.reported, len(prompt.tokens), sample.why or "UNEXPLAINED",
            )  # fmt: skip
            if not sample.why and self._dumps < DUMPS_MAX:
                self._dumps += 1
                await evidence.dump(self.stage, engine, sample, pick, self._dumps)
        if quiet and not await self._settle(worker, prompt, answer):
            self.unsettled += 1
            log.info("%s: facts of a request to %s/%d didn't come", phase, *worker)
        return answer

    async def _settle(self, worker: Worker, prompt: Prompt, answer: Answer) -> bool:
        """Waits until the router knows of every block that a request filled, and nothing moves.

        An engine doesn't compute the last token that it puts out.
        """
        size = self.stage.engines[worker[0]].block_size
        sequence = (*prompt.tokens, *answer.output)[: MODEL_LEN - 1]
        filled = (len(prompt.tokens) + len(answer.output) - 1) // size * size
        deadline_s = time.monotonic() + SETTLE_S
        facts, since_s = -1, time.monotonic()
        while time.monotonic() < deadline_s:
            explanation = await self.stage.client.explain(
                token_ids=sequence, model=MODEL, lora_name=prompt.lora, cache_salt=prompt.salt
            )
            rows = [one for one in explanation.candidates if (one.worker_id, one.dp_rank) == worker]
            stats = await self.stage.client.index_stats()
            if stats.facts_applied != facts:
                facts, since_s = stats.facts_applied, time.monotonic()
            if (
                rows
                and (rows[0].overlap_tokens.raw >= filled or not rows[0].stream_complete)
                and all(one.stream_state == "live" for one in explanation.candidates)
                and time.monotonic() - since_s >= STABLE_S
            ):
                return True
            await asyncio.sleep(0.01)
        return False

    # Phases

    async def quiet(self, count: int = 150) -> None:
        """Shared prefixes, growing conversations, whole blocks only, and the same again."""
        ids = list(self.stage.engines)
        prefixes = [self.tokens(size) for size in (64, 96, 160, 100)]
        talks: list[tuple[int, ...]] = [self.tokens(40) for _ in range(4)]
        whole = [self.tokens(size) for size in (16, 32, 64, 96, 128, 48)]
        for number in range(count):
            to = [ids[number // 4 % len(ids)]] if number % 4 == 0 else []
            output = self.rng.choice((1, 2, 4, 12, 40))
            match number % 5:
                case 0:
                    prefix = self.rng.choice(prefixes)
                    tokens = prefix + self.tokens(self.rng.randrange(1, 90))
                case 1 | 3:
                    place = self.rng.randrange(len(talks))
                    tokens = talks[place] = talks[place] + self.tokens(self.rng.randrange(5, 60))
                    answer = await self.serve("quiet", Prompt(tokens, output), to=to)
                    talks[place] += answer.output
                    if len(talks[place]) > MODEL_LEN - 110:
                        talks[place] = self.tokens(40)
                    continue
                case 2:
                    tokens = self.rng.choice(whole)
                case _:
                    tokens = self.tokens(self.rng.choice((5, 15, 31, 33, 64, 65, 200)))
            await self.serve("quiet", Prompt(tokens, output), to=to)

    async def evictions(self, count: int = 120) -> None:
        """More distinct prompts than fit, some far more popular than others."""
        prompts = [self.tokens(self.rng.randrange(120, 320)) for _ in range(60)]
        weights = [1 / (1 + place) for place in range(len(prompts))]
        ids = list(self.stage.engines)
        for number in range(count):
            (tokens,) = self.rng.choices(prompts, weights)
            cut = self.rng.choice((len(tokens), len(tokens), len(tokens) // 2))
            to = [ids[number // 3 % len(ids)]] if number % 3 == 0 else []
            await self.serve("evictions", Prompt(tokens[:cut], 6), to=to)

    async def names(self, count: int = 48) -> None:
        """The same tokens for the base model, a LoRA, two salts, and both."""
        vllms = [name for name, one in self.stage.engines.items() if one.name == "vllm"]
        texts = [self.tokens(size) for size in (64, 130)]
        for _ in range(count):
            tokens = self.rng.choice(texts) + self.tokens(self.rng.choice((0, 0, 40)))
            lora = self.rng.choice(("", "", LORA))
            salt = self.rng.choice(("", "tenant-a", "tenant-b"))
            prompt = Prompt(tokens, 4, lora=lora, salt=salt)
            await self.serve("LoRA and salts", prompt, to=vllms if lora else ())

    async def report_mode(self, count: int = 12) -> None:
        """vLLM's report mode "full", then evictions, then the same prompts again."""
        vllms = [name for name, one in self.stage.engines.items() if one.name == "vllm"]
        texts = [self.tokens(96) for _ in range(3)]
        for number in range(count):
            tokens = texts[number % 3] + self.tokens(8)
            await self.serve("report mode", Prompt(tokens, 2, report_full=True), to=vllms)
        for number in range(36):
            prompt = Prompt(self.tokens(300), 2)
            await self.serve("report mode", prompt, to=[vllms[number % len(vllms)]])
        for tokens in texts:
            for name in vllms:
                await self.serve("report mode", Prompt(tokens + self.tokens(8), 2), to=[name])

    async def burst(self, count: int = 120) -> None:
        """Many at once, with prefixes in common, more than fits: engines preempt. Some requests are
        given up half way, some ask for several outputs, some are the same. Then all is quiet, and
        what the router knows must be right."""
        prefixes = [self.tokens(128) for _ in range(6)]
        gate = asyncio.Semaphore(BURST_WIDTH)

        async def one(number: int) -> None:
            async with gate:
                tokens = self.rng.choice(prefixes) + self.tokens(self.rng.randrange(1, 120))
                prompt = Prompt(tokens, self.rng.randrange(1, 160))
                await self.serve("burst", prompt, quiet=False)
                if number % 6 == 0:
                    await self._disturb(tokens)

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
        await asyncio.sleep(2.0)
        await self.recheck("after the burst", [*prefixes, *self.pool])

    async def _disturb(self, tokens: tuple[int, ...]) -> None:
        """Straight to the engines: a request given up half way, two outputs, the same twice."""
        engines = self.stage.engines.values()
        given_up = Prompt(tokens + self.tokens(64), 200)
        for engine in engines:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(0.02, 0.2)):
                    await engine.ask(given_up, {})
        double = Prompt(tokens + self.tokens(40), 40, copies=2)
        same = Prompt(self.tokens(96), 8)
        asked = [engine.ask(prompt, {}) for engine in engines for prompt in (double, same, same)]
        await asyncio.gather(*asked)

    async def logprobs(self) -> None:
        """Requests that don't read the cache, and fill it with second copies; then evictions."""
        phase = "prompt log probabilities"
        texts = [self.tokens(size) for size in (96, 110)]
        for name in self.stage.engines:
            for tokens in texts:
                for asks in (False, True, True, False):
                    await self.serve(phase, Prompt(tokens, 2, logprobs=asks), to=[name])
        await self.recheck(phase, [*texts, *self.pool])

    async def recheck(self, phase: str, texts: Sequence[tuple[int, ...]]) -> None:
        """Prompts that the engines may hold or not, each on all of them."""
        for tokens in texts:
            for name in self.stage.engines:
                await self.serve(phase, Prompt(tokens, 2), to=[name])

    async def resets(self) -> None:
        """The same few prompts before and after every engine emptied its cache."""
        phase = "cache resets"
        texts = [self.tokens(size) for size in (96, 100, 128)]
        for name in self.stage.engines:
            for tokens in (*texts, *texts):
                await self.serve(phase, Prompt(tokens, 2), to=[name])
        await self._reset(phase)
        for name, engine in self.stage.engines.items():
            for tokens in texts * (2 * engine.ranks):
                await self.serve(phase, Prompt(tokens, 2), to=[name])

    async def _reset(self, phase: str) -> None:
        """Empties all caches."""
        for name, engine in self.stage.engines.items():
            await engine.reset()
            for rank in range(engine.ranks):
                self.judge.on_reset((name, rank), told_late=engine.name == "vllm")
        await asyncio.sleep(0.5)
        log.info("%s: all caches are empty", phase)

    async def check(self, phase: str, texts: Sequence[tuple[int, ...]]) -> None:
        """The same prompts on every engine, twice each; whether what is predicted still holds."""
        for name, engine in self.stage.engines.items():
            for tokens in (*texts, *texts) * engine.ranks:
                await self.serve(phase, Prompt(tokens, 2), to=[name])

    async def faults(self) -> None:
        """Kills each part in turn, starts it again, measures, and checks what the router knows."""
        stage = self.stage
        texts = [self.tokens(size) for size in (80, 160)]
        await self.recheck("before faults", self.pool)
        await self.check("before faults", texts)
        for name in stage.relays:
            at_s, since_s = time.time(), time.monotonic()
            await self._restart(stage.relays[name])
            await stage.ready(at_s, [name])
            self._recovered(f"relay of {name} killed", since_s)
        # The replay of vllm-two is too short for a whole life: its relay says that it is partial.
        await self.recheck("relays killed", [*texts, *self.pool])
        await self._reset("relays killed, then a reset")
        await self.check("relays killed, then a reset", texts)

        at_s, since_s = time.time(), time.monotonic()
        await self._restart(stage.nats)
        await stage.ready(at_s)
        self._recovered("NATS killed", since_s)
        await self.check("NATS killed", texts)

        at_s, since_s = time.time(), time.monotonic()
        await stage.nats.kill()
        for tokens in (*texts, *self.pool):
            for name in stage.engines:
                await self.serve("NATS away", Prompt(tokens, 2), quiet=False, to=[name])
        await asyncio.sleep(max(0.0, 5.0 - (time.monotonic() - since_s)))
        away_s = time.monotonic() - since_s
        await stage.nats.start()
        await stage.ready(at_s)
        self._recovered("NATS away, with requests meanwhile", since_s, away_s=away_s)
        await self.recheck("NATS away, then back", self.pool)

        since_s = time.monotonic()
        await self._restart(stage.router)
        await stage.ready()
        self._recovered("router killed", since_s)
        await self.recheck("router killed", self.pool)

        for name in ("vllm-one", "vllm-two"):
            await self._revive(name, *await self._engine_dies(name))
            await self.check(f"{name} killed", texts)

    async def load_faults(self) -> None:
        """The same while many requests are under way."""
        stage = self.stage
        for name, child in (
            ("relay of vllm-one", stage.relays["vllm-one"]),
            ("relay of sglang", stage.relays["sglang"]),
            ("NATS", stage.nats),
            ("router", stage.router),
        ):
            async with self._load():
                at_s, since_s = time.time(), time.monotonic()
                await self._restart(child)
                await stage.ready(0.0 if child is stage.router else at_s, self._behind(child))
                self._recovered(f"{name} killed under load", since_s)
            await self.recheck(f"{name} killed under load", self.pool)
        # The load ends before the engine is started again: the two would starve it of processors.
        async with self._load():
            died = await self._engine_dies("sglang")
        await self._revive("sglang", *died, told=" under load")
        await self.recheck("sglang killed under load", self.pool)

    @asynccontextmanager
    async def _load(self) -> AsyncIterator[None]:
        """Requests all the while; those that fail are counted, not compared."""
        stop = asyncio.Event()
        failed: Counter[str] = Counter()

        async def client() -> None:
            while not stop.is_set():
                tokens = self.rng.choice(self.pool) + self.tokens(self.rng.randrange(1, 60))
                try:
                    await self.serve("under load", Prompt(tokens, 16), quiet=False)
                except (KvRouteError, aiohttp.ClientError, EngineRefused) as error:
                    failed[type(error).__name__] += 1
                    await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            for _ in range(LOAD_WIDTH):
                group.create_task(client())
            try:
                await asyncio.sleep(1.0)
                yield
                await asyncio.sleep(1.0)
            finally:
                stop.set()
        await asyncio.sleep(2.0)
        if failed:
            log.info("under load: %s", dict(failed))

    def _behind(self, child: Child) -> list[str]:
        """The workers that a part speaks for; none: all."""
        return [name for name, relay in self.stage.relays.items() if relay is child]

    @staticmethod
    async def _restart(child: Child) -> None:
        await child.kill()
        await child.start()

    async def _engine_dies(self, name: str) -> tuple[float, float, float]:
        """Kills an engine and waits until it is picked no more; when (Unix time and monotonic), and
        how long that took."""
        at_s, since_s = time.time(), time.monotonic()
        await self.stage.engines[name].child.kill()
        await self._unschedulable(name)
        return at_s, since_s, time.monotonic() - since_s

    async def _revive(
        self, name: str, at_s: float, since_s: float, noticed_s: float, told: str = ""
    ) -> None:
        engine = self.stage.engines[name]
        await engine.child.start()
        start_s = await self.stage.engine_up(engine)
        for rank in range(engine.ranks):
            self.judge.on_restart((name, rank))
        up_s = time.monotonic()
        await self.stage.ready(at_s, [name])
        self._recovered(
            f"{name} killed{told}",
            since_s,
            unschedulable_s=noticed_s,
            engine_start_s=start_s,
            after_start_s=time.monotonic() - up_s,
        )

    async def _unschedulable(self, name: str) -> None:
        """Waits until the router picks a worker no more."""
        async with asyncio.timeout(30):
            while any(one.schedulable for one in await self._ranks_of(name)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _ranks_of(self, name: str) -> list[WorkerStatus]:
        return [one for one in await self.stage.workers() if one.worker_id == name]

    def _recovered(self, fault: str, since_s: float, **parts: float) -> None:
        seconds = time.monotonic() - since_s
        told = {key: round(value, 2) for key, value in parts.items()}
        self.recoveries.append({"fault": fault, "seconds": round(seconds, 2), **told})
        log.info("%s: live again after %.2f s %s", fault, seconds, told or "")

    async def run(self, phases: Sequence[str]) -> None:
        """These phases, in this order."""
        for name in phases:
            since_s, before = time.monotonic(), len(self.judge.samples)
            await PHASES[name](self)
            self.stage.check_alive()
            counters = await self.stage.counters()
            self.counters[name] = counters
            dropped = {key: value for key, value in counters.items() if NO_TROUBLE not in key}
            log.info("%s: counted %s", name, dropped or "nothing of note")
            verdicts = Counter(one.verdict for one in self.judge.samples[before:])
            log.info("%s: %s, %.0f s", name, dict(verdicts), time.monotonic() - since_s)


PHASES: dict[str, Callable[[Driver], Awaitable[None]]] = {
    "quiet": Driver.quiet,
    "evictions": Driver.evictions,
    "names": Driver.names,
    "logprobs": Driver.logprobs,
    "report-mode": Driver.report_mode,
    "burst": Driver.burst,
    "resets": Driver.resets,
    "faults": Driver.faults,
    "load-faults": Driver.load_faults,
}
