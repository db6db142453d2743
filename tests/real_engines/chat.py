"""Chats through gateway and router to real engines, with the openai client.

usage: python -m tests.real_engines.chat [--kinds vllm,sglang] [--chats 500] [--seed N]
Ends with one JSON line on standard output. Needs what install.sh made.

For each kind of engine: two engines, a router with the model's tokenizer, two gateways. Chats of
all shapes of tests/stage/prompts/bodies.py and random mixes of them go through a gateway, one at a
time, half of them streamed; the tokens that the router predicted as cached are compared with those
that the engine reports, and some answers with those of the engine without a gateway. Then parts are
killed while answers stream (chat_faults.py), and engines run that were started with another chat
template than the router's (`other_template`).
"""

import argparse
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from kvroute.v1 import PromptSource
from tests.real_engines.chat_bodies import ALL, all_bodies, conversations
from tests.real_engines.chat_faults import all_faults
from tests.real_engines.chat_first_token import first_tokens
from tests.real_engines.chat_fleet import Answer, Chats, a_fleet, question
from tests.real_engines.chat_model import make_room
from tests.real_engines.stage import to_the_end
from tests.stage.prompts.bodies import CHATS, Body, random_chat

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "real-engines"
TEMPLATES = ROOT / "tests/stage/prompts/templates"
TEMPLATE, OTHER = "chatml", "mirror_text"
OTHER_CHATS = 40
WARNED = "its engine makes other tokens than"
"""Of the warning tokens_differ."""
OUTPUT_TOKENS = 6
DIRECT_SHARE = 0.1
"""Of the chats, sent to their engine once more without a gateway."""
EXACT_MIN = 0.99
"""Of the chats with tokens: predicted = reported."""
VERIFIED_MIN = 0.9
"""Of the common chats (`is_common`), after the first three of their shape."""

SAMPLING: Mapping[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "seed": 1}

log = logging.getLogger("real_engines")


@dataclass
class Counts:
    """What one kind's chats came to."""

    chats: int = 0
    refused: int = 0
    """Answered with 4xx, as the engine alone answers them."""
    exact: int = 0
    over: int = 0
    under: int = 0
    estimates: Counter[str] = field(default_factory=Counter)
    """Chats without tokens, by reason."""
    sources: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    common: int = 0
    common_verified: int = 0
    reported: int = 0
    """Cached tokens."""
    prompt_tokens: int = 0
    forwarded: int = 0
    """Chats that went to their engine with tokens."""
    direct: int = 0
    """Answers compared with the engine's own."""
    odd: int = 0
    """Chats answered by the worker with another template."""
    odd_counts: int = 0
    """Those whose number of tokens differs from ours."""
    odd_over: int = 0
    """Those of which more was predicted than reused."""

    def shown(self) -> dict[str, object]:
        with_tokens = self.exact + self.over + self.under
        return {
            "chats": self.chats,
            "refused_by_engine": self.refused,
            "exact": self.exact,
            "exact_share": round(self.exact / max(1, with_tokens), 4),
            "over": self.over,
            "under": self.under,
            "estimates": dict(self.estimates),
            "sources": dict(self.sources),
            "shapes": len(self.shapes),
            "common_verified": f"{self.common_verified} of {self.common}",
            "cached_share": round(self.reported / max(1, self.prompt_tokens), 3),
            "forwarded_with_tokens": self.forwarded,
            "equal_to_direct": self.direct,
        }

    def wrong(self) -> list[str]:
        """What is not as it must be."""
        with_tokens = self.exact + self.over + self.under
        faults = []
        if self.exact < EXACT_MIN * with_tokens or not with_tokens:
            faults.append(f"only {self.exact} of {with_tokens} predictions are exact")
        if self.common_verified < VERIFIED_MIN * self.common:
            faults.append(f"{self.common_verified} of {self.common} common chats verified")
        if not self.forwarded:
            faults.append("no chat went on with its tokens")
        return faults


@dataclass
class Compared:
    """Chats of one fleet, counted and compared."""

    chats: Chats
    odd: str = ""
    """A worker with another chat template: its chats are counted apart."""
    counts: Counts = field(default_factory=Counts)

    async def one(self, name: str, body: Body, *, stream: bool, direct: bool) -> None:
        """A chat, counted and compared: two by one gateway, then two by the other."""
        counts = self.counts
        gateway = counts.chats // 2 % 2
        counts.chats += 1
        told = (await self.chats.stage.client.explain(**question(body))).prompt
        try:
            answer = await self.chats.ask(body, stream=stream, gateway=gateway)
        except openai.APIStatusError as error:
            if error.status_code >= 500:
                self.chats.faults.append(f"{name}: {error.status_code} {error.message[:200]}")
            elif "x-kvroute-reason" in error.response.headers:
                await self._check_refusal(name, body, error)
            counts.refused += 1
            return
        except openai.APIError as error:
            self.chats.faults.append(f"{name}: {type(error).__name__} {error.message[:200]}")
            return
        source = PromptSource.Name(told.source).removeprefix("PROMPT_SOURCE_").lower()
        counts.sources[f"{source}{', verified' if told.verified else ''}"] += 1
        if answer.worker == self.odd:
            self._count_odd(name, answer, told.count)
        elif told.source == PromptSource.PROMPT_SOURCE_ESTIMATE:
            counts.estimates[told.estimate_reason] += 1
        else:
            self._compare(f"{name} ({source}, {told.shape})", answer, told.count)
            counts.shapes[told.shape] += 1
            if is_common(body) and counts.shapes[told.shape] > 3:
                counts.common += 1
                counts.common_verified += told.verified
        counts.reported += answer.cached_tokens
        counts.prompt_tokens += answer.prompt_tokens
        engine = self.chats.stage.engines[answer.worker]
        if direct:
            counts.direct += 1
            alone = await self.chats.direct(body, engine, stream=stream)
            if alone.text != answer.text:
                self.chats.faults.append(
                    f"{name}: {answer.text!r}, the engine alone {alone.text!r}"
                )
        if answer.worker != self.odd:
            await self.chats.settle(question(body), answer.worker, engine.block_size)

    def _count_odd(self, name: str, answer: Answer, count: int) -> None:
        counts = self.counts
        counts.odd += 1
        counts.odd_counts += answer.prompt_tokens != count
        if answer.predicted > answer.cached_tokens:
            counts.odd_over += 1
            log.info(
                "%s on %s: predicted %d, reported %d of %d",
                *(name, answer.worker, answer.predicted, answer.cached_tokens),
                answer.prompt_tokens,
            )

    async def _check_refusal(self, name: str, body: Body, error: openai.APIStatusError) -> None:
        """A 4xx of the router's or the gateway's own is right if an engine refuses, too."""
        try:
            await self.chats.direct(body, next(iter(self.chats.stage.engines.values())))
        except openai.APIStatusError:
            return
        reason = error.response.headers["x-kvroute-reason"]
        self.chats.faults.append(f"{name}: refused with {reason}, not by the engine")

    def _compare(self, name: str, answer: Answer, count: int) -> None:
        counts = self.counts
        if answer.prompt_tokens != count:
            self.chats.faults.append(
                f"{name}: {count} tokens of ours, {answer.prompt_tokens} of the engine's"
            )
        if answer.predicted == answer.cached_tokens:
            counts.exact += 1
            return
        over = answer.predicted > answer.cached_tokens
        counts.over += over
        counts.under += not over
        log.info(
            "%s on %s: predicted %d, reported %d of %d",
            *(name, answer.worker, answer.predicted, answer.cached_tokens, answer.prompt_tokens),
        )


def is_common(body: Body) -> bool:
    """Whether a chat is one of those that most programs send: text, history, tools."""
    plain = {"role", "content"}
    return set(body) <= {"model", "messages", "tools", *SAMPLING} and all(
        set(message) <= plain and isinstance(message["content"], str) and message["role"] != "tool"
        for message in body["messages"]
    )


def bodies(count: int, rng: random.Random) -> list[tuple[str, Body]]:
    """All named chats twice, then random ones; each ends soon, and the same at each try."""
    named = [*CHATS.items(), *CHATS.items()]
    mixes = [(f"random {number}", random_chat(rng)) for number in range(count - len(named))]
    return [(name, {**body, **SAMPLING}) for name, body in [*named, *mixes][:count]]


async def all_shapes(chats: Chats, count: int, seed: int) -> Counts:
    """Chats one by one, each compared."""
    rng, compared = random.Random(seed), Compared(chats)
    for number, (name, body) in enumerate(bodies(count, rng)):
        direct = rng.random() < DIRECT_SHARE
        await compared.one(name, body, stream=number % 2 == 1, direct=direct)
        if number % 100 == 99:
            log.info("%s", json.dumps(compared.counts.shown()))
    if differ := await chats.metric("kvroute_prompt_checks_total", 'result="different"'):
        chats.faults.append(f"{differ:.0f} chats have other tokens at the engine")
    compared.counts.forwarded = int(await chats.with_tokens())
    chats.faults += compared.counts.wrong()
    return compared.counts


async def other_template(chats: Chats, odd: str) -> dict[str, object]:
    """One of the engines, `odd`, has another chat template: the router must name it, and predict
    as well as before for the other one."""
    rng, compared = random.Random(1), Compared(chats, odd)
    for number in range(OTHER_CHATS):
        body = {**random_chat(rng), **SAMPLING}
        await compared.one(f"other template, {number}", body, stream=False, direct=False)
    workers = await chats.stage.workers()
    warned = {one.worker_id for one in workers if any(WARNED in text for text in one.warnings)}
    if warned != {odd}:
        chats.faults.append(f"tokens_differ at {sorted(warned)}, wanted at {odd}")
    counts = compared.counts
    if not 0 < counts.odd < counts.chats:
        chats.faults.append(f"{counts.odd} of {counts.chats} chats are of {odd}")
    apart = {name: getattr(counts, name) for name in ("odd", "odd_counts", "odd_over")}
    return counts.shown() | apart | {"tokens_differ": sorted(warned)}


async def run(kind: str, count: int, seed: int) -> dict[str, object]:
    """All of one kind of engine."""
    template = (TEMPLATES / f"{TEMPLATE}.jinja").read_text()
    broken: list[str] = []
    shown: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder) / "room"
        make_room(BUILD, room, template)
        names = [f"{kind}-one", f"{kind}-two"]
        async with a_fleet(kind, room, BUILD / "logs", dict.fromkeys(names, ())) as chats:
            shown["chats"] = (await all_shapes(chats, count, seed)).shown()
            log.info("%s: %s", kind, json.dumps(shown["chats"]))
            for given in ALL:
                name = given.kind.name
                shown[name] = await all_bodies(chats, given, seed)
                log.info("%s: %s %s", kind, name, json.dumps(shown[name]))
            shown["conversations"] = await conversations(chats, seed)
            log.info("%s: %s", kind, json.dumps(shown["conversations"]))
            shown["first_token_ms"] = await first_tokens(chats)
            log.info("%s: %s", kind, json.dumps(shown["first_token_ms"]))
            shown["faults"] = await all_faults(chats)
            broken += chats.faults
        odd = {names[0]: (), names[1]: ("--chat-template", str(TEMPLATES / f"{OTHER}.jinja"))}
        async with a_fleet(kind, room, BUILD / "logs", odd) as chats:
            shown["other_template"] = await other_template(chats, names[1])
            broken += chats.faults
    return shown | {"broken": broken}


async def run_all(kinds: list[str], count: int, seed: int) -> int:
    """Every kind; returns the exit code."""
    line = {kind: await run(kind, count, seed) for kind in kinds}
    sys.stdout.write(json.dumps({"chat": line}) + "\n")
    return int(any(one["broken"] for one in line.values()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.chat")
    parser.add_argument("--kinds", default="vllm,sglang", help="some of %(default)s")
    parser.add_argument("--chats", type=int, default=500, help="for each kind")
    parser.add_argument("--seed", type=int, default=1, help="of random chats")
    given = parser.parse_args()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    sys.exit(to_the_end(run_all(given.kinds.split(","), given.chats, given.seed)))


if __name__ == "__main__":
    main()
