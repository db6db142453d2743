"""Stories of the queue in tests/router/decide/queue/scenarios/*.txt: whose turn it is, and why.

    # A short request does not wait behind a long one.
    queue order=shortest-first
    offer long prompt=8000 output=500
    offer short prompt=100 output=20
    go 2
    ----
    short long

A command is one line; after `----` comes its output, up to an empty line; a command without output
prints nothing. `#` begins a comment. KVROUTE_REWRITE=1 python -m pytest tests/router/decide/queue
writes the outputs again: read the diff, and commit only what you understand and want.

Commands (seconds, tokens):
- queue KEY=VALUE...: another queue; keys are those of the section `queue`, a dot leads to an inner
  one. bands=NAME:FROM[:WEIGHT],...: of bands, name, from_priority and weight.
- offer NAME[*N] [prompt=N] [held=N] [output=N] [text=T] [KEY=VALUE...]: a request comes, or N of
  them, named NAME-1 and so on; prints the request that it displaces, or the refusal. held: prompt
  tokens that a worker with room holds. text: the prompt's blocks, one a letter. Further keys are
  fields of `Waiter`: priority, tenant; expires_s and deadline_s count from now.
- wait S: time passes.
- go N: N workers have room for a request each; prints the requests that go.
- over: prints the requests whose wait is over.
- priority NAME P: gives a request that waits another priority.
- cancel NAME: the caller is gone.
- show: all that wait, by band.
- counts: of requests by what became of them.
"""

import os
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml

from router.config.settings.queue_settings import QueueSettings
from router.decide.queue.admission_queue import AdmissionQueue, QueueFull
from router.decide.waiter import Waiter
from tests.router.decide.queue.test_trie import chain_of
from tests.router.decide.queue.waiting import POOL, Workers, check_counts, expired, names, offered
from tests.stage import script

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
REWRITE = "KVROUTE_REWRITE"
_FIELDS = {field.name for field in fields(Waiter)}


class Player:
    """Carries out the commands of one file."""

    def __init__(self) -> None:
        self._workers = Workers()
        self._queue = AdmissionQueue(QueueSettings(), Random(7), self._workers)
        self._now_s = 0.0
        self._room = 0

    def play(self, line: str) -> str:
        """The output of a command."""
        verb, *words = line.split()
        plain = [word for word in words if "=" not in word]
        pairs = (word.split("=", 1) for word in words if "=" in word)
        values = {key: yaml.safe_load(text) for key, text in pairs}
        match verb, plain:
            case "queue", []:
                self._workers, self._now_s = Workers(), 0.0
                self._queue = AdmissionQueue(_settings(values), Random(7), self._workers)
            case "offer", [name]:
                return self._offer_all(name, values)
            case "wait", [seconds]:
                self._now_s += float(seconds)
            case "go", [count]:
                return self._go(int(count))
            case "over", []:
                return names(expired(self._queue, self._now_s)) or "-"
            case "priority", [name, priority]:
                self._queue.reprioritize(self._waiter(name), int(priority), self._now_s)
            case "cancel", [name]:
                self._queue.cancel(self._waiter(name), self._now_s)
            case "show", []:
                return self._show()
            case "counts", []:
                return ", ".join(f"{n} {fate}" for fate, n in sorted(self._queue.counts.items()))
            case _:
                raise ValueError(f"no such command: {line}")
        check_counts(self._queue)
        return ""

    def _offer_all(self, name: str, values: dict[str, Any]) -> str:
        base, _, count = name.partition("*")
        all_names = [f"{base}-{i + 1}" for i in range(int(count))] if count else [base]
        return "\n".join(filter(None, (self._offer(one, values) for one in all_names)))

    def _offer(self, name: str, values: dict[str, Any]) -> str:
        given = {key: value for key, value in values.items() if key in _FIELDS}
        prompt = values.get("prompt", 0)
        held = self._workers.overlaps[name] = values.get("held", 0)
        for key in ("expires_s", "deadline_s"):
            if key in given:
                given[key] += self._now_s
        if "text" in values:
            given["prefixes"] = chain_of(values["text"])
        given |= {"prompt_tokens": prompt, "new_tokens": prompt - held}
        waiting = {waiter.request_id for _, waiter in self._queue.waiters()}
        try:
            offered(self._queue, name, self._now_s, output_tokens=values.get("output", 0), **given)
        except QueueFull as refusal:
            return f"{name} refused: {refusal.message}"
        gone = waiting - {waiter.request_id for _, waiter in self._queue.waiters()}
        return f"{name} displaces {gone.pop()}" if gone else ""

    def _go(self, count: int) -> str:
        self._room += 1
        gone: list[Waiter] = []
        for waiter in self._queue.candidates(POOL, self._room, self._now_s):
            held = waiter.prompt_tokens - waiter.new_tokens
            self._queue.dispatched(waiter, waiter.new_tokens, held, self._now_s)
            gone.append(waiter)
            if len(gone) == count:
                break
        return names(gone) or "-"

    def _show(self) -> str:
        bands: dict[str, list[str]] = {}
        for _, waiter in self._queue.waiters():
            bands.setdefault(self._queue.band(waiter), []).append(waiter.request_id)
        return "\n".join(f"{band}: {' '.join(waiting)}" for band, waiting in bands.items()) or "-"

    def _waiter(self, name: str) -> Waiter:
        found = self._queue.find(name)
        if not found:
            raise ValueError(f"{name} does not wait")
        return found[0]


def _settings(values: dict[str, Any]) -> QueueSettings:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = _bands(value) if key == "bands" else value
    return msgspec.convert(tree, QueueSettings)


def _bands(text: str) -> list[dict[str, Any]]:
    names = ("name", "from_priority", "weight")
    bands = (band.split(":") for band in text.split(","))
    return [
        {key: part if key == "name" else int(part) for key, part in zip(names, band, strict=False)}
        for band in bands
    ]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_scenario(path: Path) -> None:
    text = path.read_text()
    now = "".join(script.played(text, Player().play))
    if os.environ.get(REWRITE):
        path.write_text(now)
        return
    assert now == text, f"{path.name} differs; {REWRITE}=1 writes it again"


def test_there_are_scenarios() -> None:
    assert FILES
