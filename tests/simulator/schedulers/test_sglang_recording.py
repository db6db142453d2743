"""SGLang's stand-in against a recording of the engine that it stands for.

tests/golden/sglang-0.5.23/server-single: a server with 128 pages of 16 tokens, and requests for
answers of exact length. First they come one after another, with reuse, splits, a salt, the same
pages under two keys, and evictions; then fourteen at once, of which five fit.

What the recording leaves out is filled in: the server's warm-up before anybody listened (29 tokens
and 8, by its LoadStat and what is evicted of it), and the text of the one chat request.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from simulator.engines.block_pool import PoolEvent, Removed, Stored
from simulator.engines.content import add_tokens
from simulator.engines.scheduler import Sequence
from simulator.schedulers.sglang.config import SglangConfig
from simulator.schedulers.sglang.scheduler import SglangScheduler

RECORDING = Path(__file__).parents[2] / "golden" / "sglang-0.5.23" / "server-single"
WARM_UP = (29, 8)
CHAT = (20, 3)
SEQUENTIAL_FRAMES = 34
CONCURRENT_FRAMES = 51


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDING / name).read_text().splitlines()]


class Engine:
    """The stand-in, with its pages renamed to what the recording calls them."""

    def __init__(self) -> None:
        config = SglangConfig(block_count=128, block_size=16, max_num_seqs=1024, ignore_eos=True)
        self.scheduler = SglangScheduler(config)
        self.names: dict[int, int] = {}
        """ours -> the recording's"""

    def add(self, prompt: list[int], answer_tokens: int, salt: str = "") -> Sequence:
        tokens = np.array(prompt, np.uint32)
        return add_tokens(self.scheduler, tokens, answer_tokens, 0.0, cache_salt=salt)

    def step(self) -> list[PoolEvent]:
        step = self.scheduler.begin_step(0.0)
        return self.scheduler.end_step(step.end_s).events if step else []

    def drain(self) -> list[PoolEvent]:
        events: list[PoolEvent] = []
        while self.scheduler.running() or self.scheduler.waiting():
            events += self.step()
        return events

    def named(self, events: list[PoolEvent], recorded: list[dict[str, Any]]) -> list[Any]:
        """Ours in the recording's names, learned from stores that come in the same place."""
        stored = [page for one in recorded if "stored" in one for page in one["stored"]]
        ours = [page for one in events if isinstance(one, Stored) for page in one.hashes]
        self.names.update(zip(ours, stored, strict=False))
        named: list[Any] = []
        for event in events:
            match event:
                case Stored():
                    parent = None if event.parent is None else self.names.get(event.parent)
                    named.append(("stored", parent, *map(self.names.get, event.hashes)))
                case Removed():
                    named.append(("removed", *map(self.names.get, event.hashes)))
        return named


def _told(recorded: list[dict[str, Any]]) -> list[Any]:
    return [
        ("stored", one["parent"], *one["stored"])
        if "stored" in one
        else ("removed", *one["removed"])
        for one in recorded
    ]


def _pages(events: Iterable[Any]) -> list[Any]:
    """Without the borders of events: pages in the order in which they came and went."""
    pages: list[Any] = []
    for kind, *rest in events:
        parent, own = (rest[0], rest[1:]) if kind == "stored" else (None, rest)
        for page in own:
            pages.append((kind, parent, page))
            parent = page if kind == "stored" else None
    return pages


def test_recorded_events_come_in_the_same_order() -> None:
    requests = _lines("requests.jsonl")
    frames = [frame["events"] for frame in _lines("frames.decoded.jsonl")]
    engine = Engine()
    engine.add(list(range(WARM_UP[0])), WARM_UP[1])
    warm_up = [page for one in engine.drain() if isinstance(one, Stored) for page in one.hashes]
    gone = next(one["removed"] for frame in frames for one in frame if "removed" in one)
    engine.names = dict(zip(reversed(warm_up), gone, strict=False))

    by_label = {request["label"]: request for request in requests}
    for request in requests:
        first, last = request["frames_seen"]
        if last > SEQUENTIAL_FRAMES or request["label"] == "tokenize":
            continue
        body = request["request"]
        prompt = request["prompt_token_ids"] or list(range(1000, 1000 + CHAT[0]))
        wanted = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        salt = body.get("cache_salt") or body.get("extra_key") or ""
        sequence = engine.add(prompt, wanted, salt)
        events = engine.drain()
        recorded = [event for frame in frames[first:last] for event in frame]
        assert _pages(engine.named(events, recorded)) == _pages(_told(recorded)), request["label"]
        assert sequence.cached_tokens == request["cached_tokens"], request["label"]

    # Fourteen at once: who came when shows in the order of their first stores.
    recorded = [event for frame in frames[SEQUENTIAL_FRAMES:CONCURRENT_FRAMES] for event in frame]
    digests = {
        f"{prompt[0]} {prompt[1]}": prompt
        for label, request in by_label.items()
        if label.startswith("conc-") and (prompt := request["prompt_token_ids"])
    }
    order = [
        digests[one["tokens"].split(": ")[1].split(" ..")[0]]
        for one in recorded
        if "stored" in one and one["parent"] is None
    ]
    assert len(order) == 14
    events = []
    for i, prompt in enumerate(order):
        if i == 2:
            events += engine.step()  # two were there when the others came
        engine.add(prompt, 200)
    events += engine.drain()
    assert _pages(engine.named(events, recorded)) == _pages(_told(recorded))
    assert engine.scheduler.load().preemptions == 0
