"""Chats through a real Envoy and its endpoint picker to real engines.

usage: python -m tests.real_engines.envoy [--kinds vllm,sglang] [--chats 150] [--seed N]
Ends with one JSON line on standard output. Needs what install.sh and tests/envoy/install.sh made.

For each kind of engine: two engines, a router, `kvroute picker`, and Envoy with what `kvroute
envoy-config` prints. Chats of all shapes go through Envoy one at a time, half of them streamed. Of
each, three numbers of cached tokens must be equal: the engine's in the answer that the client has,
the one that the picker read of the passing answer and reported, and the router's prediction. Then
answers go around the picker, and the router must see by events and load alone that each has ended.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import openai

from kvroute.v1 import PromptSource
from tests.real_engines.chat import BUILD, EXACT_MIN, TEMPLATE, TEMPLATES, bodies
from tests.real_engines.chat_fleet import Answer, Chats, a_fleet, asked, question
from tests.real_engines.chat_model import make_room
from tests.real_engines.processes import Child
from tests.real_engines.stage import StageBroken, to_the_end
from tests.stage.programs import KVROUTE, kvroute
from tests.stage.prompts.bodies import Body
from tests.stage.waiting import free_ports

AROUND = 20
"""Chats whose answers go around the picker."""
UNOBSERVED_S = 300.0
"""After which the picker itself would end those: longer than they are waited for."""
ENDS_S = 30.0
READY_S = 60.0
PREDICTED = 'kvroute_cached_tokens_total{kind="predicted"}'
REPORTED = 'kvroute_cached_tokens_total{kind="reported"}'

log = logging.getLogger("real_engines")


@dataclass
class Counts:
    """What one kind's chats came to."""

    chats: int = 0
    refused: int = 0
    """By their engine, with 4xx."""
    exact: int = 0
    inexact: int = 0
    estimates: int = 0
    """Chats without tokens: nothing is predicted of them."""
    cached: int = 0
    prompt_tokens: int = 0


def binary() -> str:
    """Envoy's; raises StageBroken."""
    path = BUILD.parent / "envoy" / "envoy" / "_bin" / "envoy"
    if not path.exists():
        raise StageBroken(f"no Envoy at {path}: `sh tests/envoy/install.sh` installs it")
    return str(path)


@asynccontextmanager
async def a_picker(chats: Chats, room: Path, answers: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of an Envoy before a picker."""
    logs, target = BUILD / "logs", chats.stage.target
    picker_port, metrics, listen, admin = (free_ports(4) + number for number in range(4))
    picker = Child(
        f"picker-{answers}",
        [
            *(*KVROUTE, "picker", "--router", target, "--listen", f"127.0.0.1:{picker_port}"),
            *("--metrics-listen", f"127.0.0.1:{metrics}"),
            *("--picker-unobserved-s", str(UNOBSERVED_S)),
        ],
        logs,
    )
    envoy = Child(
        f"envoy-{answers}",
        [
            *(binary(), "-c", str(room / f"envoy-{answers}.yaml"), "--concurrency", "1"),
            *("--use-dynamic-base-id", "--disable-hot-restart", "-l", "warning"),
        ],
        logs,
    )
    code, config, err = await kvroute(
        *("envoy-config", "--target", target, "--picker", f"127.0.0.1:{picker_port}"),
        *("--listen", f"127.0.0.1:{listen}", "--admin", f"127.0.0.1:{admin}"),
        *("--answers", answers),
    )
    if code:
        raise StageBroken(f"kvroute envoy-config failed: {err}")
    (room / f"envoy-{answers}.yaml").write_text(config)
    try:
        await picker.start()
        await envoy.start()
        await _healthy(chats.stage.session, admin, envoy)
        url = f"http://127.0.0.1:{listen}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
    finally:
        await envoy.stop()
        await picker.stop()


async def _healthy(session: aiohttp.ClientSession, admin: int, envoy: Child) -> None:
    """Until Envoy sees its picker so."""
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s and envoy.running:
        try:
            async with session.get(f"http://127.0.0.1:{admin}/clusters") as answer:
                lines = (await answer.text()).splitlines()
        except aiohttp.ClientError:
            lines = []
        flags = [line for line in lines if line.startswith("kvroute::") and "health_flags" in line]
        if flags and all(line.endswith("::healthy") for line in flags):
            return
        await asyncio.sleep(0.1)
    raise StageBroken(f"Envoy has no picker\n{envoy.last_words()}")


async def all_shapes(chats: Chats, client: openai.AsyncOpenAI, count: int, seed: int) -> Counts:
    """Chats one by one, each compared."""
    counts = Counts()
    for number, (name, body) in enumerate(bodies(count, random.Random(seed))):
        told = (await chats.stage.client.explain(**question(body))).prompt
        before = await _cached(chats)
        counts.chats += 1
        try:
            answer = await asked(client, body, stream=number % 2 == 1)
        except openai.APIStatusError as error:
            if error.status_code >= 500:
                chats.faults.append(f"{name}: {error.status_code} {error.message[:200]}")
            counts.refused += 1
            continue
        except openai.APIError as error:
            chats.faults.append(f"{name}: {type(error).__name__} {error.message[:200]}")
            continue
        await _idle(chats, name)
        predicted, reported = (
            round(now - then) for now, then in zip(await _cached(chats), before, strict=True)
        )
        counts.cached += answer.cached_tokens
        counts.prompt_tokens += answer.prompt_tokens
        if reported != answer.cached_tokens:
            chats.faults.append(
                f"{name}: the picker reported {reported} cached tokens of {answer.cached_tokens}"
            )
        if told.source == PromptSource.PROMPT_SOURCE_ESTIMATE:
            counts.estimates += 1
        elif predicted == answer.cached_tokens:
            counts.exact += 1
        else:
            counts.inexact += 1
            log.info("%s: predicted %d, reused %d", name, predicted, answer.cached_tokens)
        await _settled(chats, body, answer)
    with_tokens = counts.exact + counts.inexact
    if counts.exact < EXACT_MIN * with_tokens or not with_tokens:
        chats.faults.append(f"only {counts.exact} of {with_tokens} predictions are exact")
    return counts


async def around(chats: Chats, client: openai.AsyncOpenAI, seed: int) -> dict[str, object]:
    """Answers that the picker does not see: the router's reservations end by load."""
    before = await chats.metric("kvroute_unobserved_steps_total")
    rng = random.Random(seed)
    chosen = [body for _, body in bodies(10 * AROUND, rng)]
    answered, began_s = 0, time.monotonic()
    while answered < AROUND:
        try:
            await asked(client, chosen.pop(), stream=bool(answered % 2))
        except openai.BadRequestError:
            continue
        answered += 1
    ended_s = time.monotonic()
    await _idle(chats, "answers around the picker")
    steps = await chats.metric("kvroute_unobserved_steps_total") - before
    if steps < AROUND:
        chats.faults.append(f"{AROUND} answers around the picker made {steps:.0f} steps")
    return {
        "answers": answered,
        "answered_in_s": round(ended_s - began_s, 1),
        "ended_after_s": round(time.monotonic() - ended_s, 2),
        "steps": steps,
    }


async def _cached(chats: Chats) -> tuple[float, float]:
    """Cached tokens so far: predicted, reported."""
    return await chats.metric(PREDICTED), await chats.metric(REPORTED)


async def _idle(chats: Chats, name: str) -> None:
    """Until the router has no reservation."""
    deadline_s = time.monotonic() + ENDS_S
    while await chats.metric("kvroute_reservations"):
        if time.monotonic() > deadline_s:
            raise StageBroken(f"{name}: a reservation did not end in {ENDS_S:g} s")
        await asyncio.sleep(0.01)


async def _settled(chats: Chats, body: Body, answer: Answer) -> None:
    """Until the router knows of the prompt's blocks, on the worker that has most of them."""
    rows = (await chats.stage.client.explain(**question(body))).candidates
    best = max(rows, key=lambda row: row.overlap_tokens.raw)
    size = chats.stage.engines[best.worker_id].block_size
    if answer.prompt_tokens >= size:
        await chats.settle(question(body), best.worker_id, size)


async def run(kind: str, count: int, seed: int) -> dict[str, object]:
    """All of one kind of engine."""
    shown: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder) / "room"
        make_room(BUILD, room, (TEMPLATES / f"{TEMPLATE}.jinja").read_text())
        names = [f"{kind}-one", f"{kind}-two"]
        async with a_fleet(kind, room, BUILD / "logs", dict.fromkeys(names, ())) as chats:
            async with a_picker(chats, room, "through") as client:
                shown["chats"] = asdict(await all_shapes(chats, client, count, seed))
            log.info("%s: %s", kind, json.dumps(shown["chats"]))
            async with a_picker(chats, room, "around") as client:
                shown["around"] = await around(chats, client, seed)
            log.info("%s: %s", kind, json.dumps(shown["around"]))
            return shown | {"broken": chats.faults}


async def run_all(kinds: list[str], count: int, seed: int) -> int:
    """Every kind; returns the exit code."""
    line = {kind: await run(kind, count, seed) for kind in kinds}
    sys.stdout.write(json.dumps({"envoy": line}) + "\n")
    return int(any(one["broken"] for one in line.values()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_engines.envoy")
    parser.add_argument("--kinds", default="vllm,sglang", help="some of %(default)s")
    parser.add_argument("--chats", type=int, default=150, help="for each kind")
    parser.add_argument("--seed", type=int, default=1, help="of random chats")
    given = parser.parse_args()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    sys.exit(to_the_end(run_all(given.kinds.split(","), given.chats, given.seed)))


if __name__ == "__main__":
    main()
