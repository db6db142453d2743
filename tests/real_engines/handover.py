"""Prefill and decode apart on real engines: a proxy that goes by nothing but kvroute's answers.

usage: python -m tests.real_engines.handover [--kinds nixl,mooncake,sglang] [--seed N]
Ends with one JSON line on standard output. Runs in a network namespace of its own, since Mooncake
listens on all interfaces. Wants what install.sh made.
"""

import argparse
import asyncio
import fcntl
import json
import logging
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from kvroute.client import Pick, RoutedRequest
from kvroute.v1 import Phase
from tests.real_engines.engines import MODEL, Answer, EngineRefused, Prompt, samples
from tests.real_engines.pairs import KINDS
from tests.real_engines.stage import Stage, StageBroken, a_stage, to_the_end

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "real-engines"
LOCAL_TOKENS = 40
"""A turn with no more new tokens stays on the decode worker."""
ROUTER = ("--routing-local-prefill-tokens", str(LOCAL_TOKENS))
SESSIONS = 8
TURNS = 4
SETTLE_S = 5.0
LIMIT_S = 30.0
"""A proxy's own: a decode worker may wait far longer for a prefill worker that is gone."""
GONE_WITHIN_S = 60.0
IFF_UP = 0x1
SIOCSIFFLAGS = 0x8914

log = logging.getLogger("real_engines")


@dataclass
class Served:
    """One request, as the proxy saw it."""

    pick: Pick
    answer: Answer
    """The picked worker's."""
    first: Answer | None
    """The prefill worker's; None where the picked one did all."""


@dataclass
class Proxy:
    """Does what router.proto says of PrefillWorker."""

    stage: Stage

    async def serve(
        self,
        prompt: Prompt,
        session: str = "",
        excluded: Sequence[str] = (),
        between: Callable[[], Awaitable[None]] | None = None,
    ) -> Served:
        """Routes, sends to one worker or two, reports. between: once the prompt is computed, or
        before both are asked, where they are asked at once."""
        async with self.stage.client.request(
            token_ids=prompt.tokens,
            model=MODEL,
            phase=Phase.PHASE_PREFILL_DECODE,
            expected_output_tokens=prompt.output_tokens,
            session_id=session,
            excluded_worker_ids=excluded,
            timeout_s=20.0,
        ) as request:
            # The time limit stands inside, so that it is reported as one.
            async with asyncio.timeout(LIMIT_S):
                served = await self._ask(request, prompt, between or _nothing)
            request.output_tokens = len(served.answer.output)
        return served

    async def _ask(
        self, request: RoutedRequest, prompt: Prompt, between: Callable[[], Awaitable[None]]
    ) -> Served:
        pick, engines = request.pick, self.stage.engines
        decode, prefill = engines[pick.worker_id], pick.prefill_worker
        if prefill is None:
            answer = await decode.ask(prompt, pick.headers)
            request.cached_tokens = answer.cached_tokens
            return Served(pick, answer, None)
        compute = partial(
            engines[prefill.worker_id].ask, prompt, prefill.headers, prefill.prefill_body
        )
        if prefill.engine == "sglang":
            await between()
            async with asyncio.TaskGroup() as both:
                computes = both.create_task(compute())
                decodes = both.create_task(decode.ask(prompt, pick.headers, prefill.decode_body()))
            first, answer = computes.result(), decodes.result()
            request.cached_tokens = first.cached_tokens
            await request.prefill_done()
        else:
            first = await compute()
            request.cached_tokens = first.cached_tokens
            await request.prefill_done()
            await between()
            answer = await decode.ask(prompt, pick.headers, prefill.decode_body(first.body))
        return Served(pick, answer, first)


async def _nothing() -> None:
    pass


@dataclass
class Checks:
    """What was found, by name."""

    good: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    measured: dict[str, object] = field(default_factory=dict)

    def __call__(self, name: str, holds: bool, evidence: object) -> None:
        if holds:
            self.good[name] = self.good.get(name, 0) + 1
        else:
            self.bad.append(f"{name}: {evidence}")
            log.error("%s: NO, %s", name, evidence)


@dataclass
class Story:
    """What happens to a pair of workers."""

    stage: Stage
    checks: Checks
    rng: random.Random

    def __post_init__(self) -> None:
        self.proxy = Proxy(self.stage)
        engines = list(self.stage.engines.values())
        self.prefill, self.decode = engines[0], engines[1]
        self.alone = engines[-1]
        """One that serves whole requests, too."""

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(3, 1000), k=count))

    async def run(self) -> None:
        for engine in (self.prefill, self.alone):
            if engine.name == "vllm":  # the first request loads code, which takes long if all do
                await engine.ask(Prompt(self.tokens(8), 1, salt="warm"), {})
        await self.conversations()
        if self.decode.name == "vllm":
            await self.streamed_chat()
            await self.abandoned()
        await self.prefill_killed()

    async def conversations(self) -> None:
        """Sessions that grow: by much, which makes a pair, and by little, which stays local."""
        talks: list[tuple[int, ...]] = [
            self.tokens(self.rng.randrange(100, 200)) for _ in range(SESSIONS)
        ]
        for turn in range(TURNS):
            for place, talk in enumerate(talks):
                little = turn % 2 == 1 and place % 2 == 0
                more = self.rng.randrange(3, 30) if little else self.rng.randrange(45, 70)
                prompt = Prompt(talk + self.tokens(more), self.rng.choice((1, 6, 9)))
                talks[place] = prompt.tokens + await self.turn(prompt, f"talk-{place}")

    async def turn(self, prompt: Prompt, session: str) -> tuple[int, ...]:
        """One request, with all that must hold. Returns what came out."""
        before = await self.decode.prompt_tokens()
        served = await self.proxy.serve(prompt, session)
        where = {
            name: count - before.get(name, 0.0)
            for name, count in (await self.decode.prompt_tokens()).items()
        }
        pick, prefill, check = served.pick, served.pick.prefill_worker, self.checks
        if served.first is not None and prefill is not None:
            predicted = len(prompt.tokens) - prefill.new_tokens
            reported = served.first.cached_tokens
            check("prefill hits as predicted", predicted == reported, (predicted, reported))
            if where:
                check("decode computed no prompt", not where.get("local_compute"), where)
                check("decode fetched", bool(where.get("external_kv_transfer")), where)
                held = where.get("local_cache_hit", 0.0)
                predicted = pick.overlap_tokens.usable
                check("decode hits as predicted", predicted == held, (predicted, held))
        else:
            reported = served.answer.cached_tokens
            predicted = pick.overlap_tokens.usable
            check("local hits as predicted", predicted == reported, (predicted, reported))
            new = len(prompt.tokens) - predicted
            check("local for little only", new <= LOCAL_TOKENS, new)
        alone = await self.reference(prompt)
        check("same text as alone", alone == served.answer.output, (alone, served.answer.output))
        known = await self.settled(prompt, served)
        check("the router knows what both hold", known[0] == known[1], known)
        return served.answer.output

    async def reference(self, prompt: Prompt) -> tuple[int, ...]:
        """What one engine says that computes all of it: nobody else has this salt."""
        salt = f"alone-{self.rng.getrandbits(64):x}"
        whole = Prompt(prompt.tokens, prompt.output_tokens, salt=salt)
        return (await self.alone.ask(whole, {})).output

    async def settled(
        self, prompt: Prompt, served: Served
    ) -> tuple[dict[str, int], dict[str, int]]:
        """What the router should know of both workers, and what it knows in the end, in tokens."""
        sequence = prompt.tokens + served.answer.output
        size = self.decode.block_size
        wanted = {}
        if served.first is not None:
            wanted[self.prefill.worker_id] = len(prompt.tokens) // size * size
        if self.decode.caches:
            # The last token that comes out is not computed.
            wanted[self.decode.worker_id] = (len(sequence) - 1) // size * size
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            told = await self.stage.client.explain(token_ids=sequence, model=MODEL)
            known = {
                row.worker_id: row.overlap_tokens.raw
                for row in told.candidates
                if row.worker_id in wanted
            }
            # The prefill worker may hold more, of what it computed for earlier turns.
            if known == wanted or time.monotonic() > deadline_s:
                return wanted, known
            await asyncio.sleep(0.01)

    async def streamed_chat(self) -> None:
        """A caller's body that doesn't fit a prefill worker as it is."""
        words = " ".join(self.rng.choices(("red", "green", "blue", "grey"), k=40))
        chat = {"model": MODEL, "messages": [{"role": "user", "content": words}]}
        asks = chat | {
            "max_completion_tokens": 6,
            "min_tokens": 6,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens = json.loads(await self.decode.post("/tokenize", chat))["tokens"]
        path, check = "/v1/chat/completions", self.checks
        async with self.stage.client.request(
            token_ids=tokens, model=MODEL, phase=Phase.PHASE_PREFILL_DECODE, timeout_s=20.0
        ) as request:
            pick, prefill = request.pick, request.pick.prefill_worker
            if prefill is None:
                raise StageBroken("a new chat makes no pair")
            body = asks | prefill.prefill_body
            first = json.loads(await self.prefill.post(path, body, prefill.headers))
            await request.prefill_done()
            body = asks | prefill.decode_body(first)
            async with asyncio.timeout(LIMIT_S):
                streamed = await self.decode.post(path, body, pick.headers)
        said = first["usage"]["completion_tokens"]
        check("the prefill worker puts out one token", said == 1, said)
        salted = asks | {"cache_salt": "alone-in-a-chat"}
        alone = await self.decode.post(path, salted, {})
        check("same chat as alone", spoken(alone) == spoken(streamed), (alone, streamed))

    async def abandoned(self) -> None:
        """A prompt is computed and nobody fetches it: its blocks are held, then free again."""

        async def never() -> None:
            raise TimeoutError

        with suppress(TimeoutError):
            await self.proxy.serve(Prompt(self.tokens(200), 4), between=never)
        since_s = time.monotonic()
        held = now = await self.prefill.cache_usage()
        while now and time.monotonic() - since_s < GONE_WITHIN_S:
            await asyncio.sleep(0.1)
            now = await self.prefill.cache_usage()
        self.checks("abandoned blocks are held", held > 0, held)
        self.checks("and free again", now == 0, now)
        self.checks.measured["abandoned_held_s"] = round(time.monotonic() - since_s, 1)

    async def prefill_killed(self) -> None:
        """The prefill worker dies with a prompt that nobody has fetched."""
        prompt, check = Prompt(self.tokens(220), 6), self.checks
        killed_at_s = 0.0

        async def kill() -> None:
            nonlocal killed_at_s
            await self.prefill.child.kill()
            killed_at_s = time.monotonic()

        said = "an answer"
        try:
            await self.proxy.serve(prompt, between=kill)
        except (EngineRefused, aiohttp.ClientError, TimeoutError, ExceptionGroup) as error:
            said = repr(error)
        took_s = time.monotonic() - killed_at_s
        check("no answer without the prefill worker", said != "an answer", said)
        self.checks.measured["then_it_said"] = said[:160]
        self.checks.measured["after_s"] = round(took_s, 2)
        served = await self.proxy.serve(prompt, excluded=[self.prefill.worker_id])
        check("routed again without it", served.first is None, served.pick)
        alone = await self.reference(prompt)
        check("same text as alone", alone == served.answer.output, (alone, served.answer.output))
        await self.gone(self.prefill.worker_id)
        self.checks.measured["out_of_picks_after_s"] = round(time.monotonic() - killed_at_s, 1)
        served = await self.proxy.serve(Prompt(self.tokens(200), 4))
        check("nobody is asked to hand over", served.first is None, served.pick)
        held = [(one.worker_id, one.reserved) for one in await self.stage.workers() if one.reserved]
        check("nothing stays reserved", not held, held)
        at_s = time.time()
        await self.prefill.child.start()
        await self.stage.engine_up(self.prefill)
        await self.stage.ready(at_s, [self.prefill.worker_id])
        for place in range(2):
            prompt = Prompt(self.tokens(200), 6)
            served = await self.proxy.serve(prompt, f"again-{place}")
            alone = await self.reference(prompt)
            check("a pair again", served.first is not None, served.pick.receipt.prefill)
            check("same text", alone == served.answer.output, (alone, served.answer.output))

    async def gone(self, worker_id: str) -> None:
        """Waits until the router picks it no more."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while any(
            one.schedulable for one in await self.stage.workers() if one.worker_id == worker_id
        ):
            if time.monotonic() > deadline_s:
                raise StageBroken(f"{worker_id} is dead and still picked")
            await asyncio.sleep(0.02)


def spoken(stream: str) -> tuple[str, int]:
    """The text of a streamed chat, and its tokens."""
    text, tokens = "", 0
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        chunk = json.loads(data)
        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens


async def run(kind: str, seed: int) -> dict[str, object]:
    """One kind from start to end; what came out."""
    checks = Checks()
    logs = BUILD / "logs" / kind
    fleet = KINDS[kind]
    told: dict[str, object] = {"hand_over": kind}
    try:
        async with a_stage(BUILD, logs, fleet, ROUTER) as stage:
            await Story(stage, checks, random.Random(seed)).run()
            told["counted"] = await counters(stage)
            told["warnings"] = [line for one in await stage.workers() for line in one.warnings]
    except (Exception, asyncio.CancelledError) as error:
        told["broken"] = f"{type(error).__name__}: {error}"
        log.error("broken off", exc_info=not isinstance(error, StageBroken))
    return told | {"good": checks.good, "bad": checks.bad, "measured": checks.measured}


async def counters(stage: Stage) -> dict[str, float]:
    """How pairs were picked, and how the router's own check of reported cached tokens came out."""
    wanted = "kvroute_self_checks_total{", 'kvroute_marked_picks_total{mark="pair_'
    counted = await samples(stage.session, stage.metrics["router"])
    return {key: count for key, count in counted.items() if key.startswith(wanted) and count}


def loopback_up() -> None:
    """A new network namespace has a loopback interface that is down."""
    with socket.socket() as any_socket:
        wish = struct.pack("16sh", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, wish)


async def run_all(kinds: Sequence[str], seed: int) -> int:
    """Returns the exit code."""
    told = []
    for kind in kinds:
        log.info("hand-over by %s, seed %d", kind, seed)
        told.append(await run(kind, seed))
        log.info("%s", json.dumps(told[-1], indent=1))
    sys.stdout.write(json.dumps(told) + "\n")
    return int(any("broken" in one or one["bad"] for one in told))


def main() -> None:
    """Goes into a namespace of its own, then runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.handover")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of prompts")
    parser.add_argument("--failed", action="store_true", help="fail, whatever comes out")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        own = ["unshare", "--map-root-user", "--net", "--"]
        again = [sys.executable, "-m", "tests.real_engines.handover", "--inside", *sys.argv[1:]]
        os.execvp(own[0], [*own, *again])
    loopback_up()
    code = to_the_end(run_all(given.kinds.split(","), given.seed))
    sys.exit(code or int(given.failed))


if __name__ == "__main__":
    main()
