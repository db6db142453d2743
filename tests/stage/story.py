"""Scenario files: stories of a fleet and its router, with what came out and what must hold.

    # Prompts that share nothing.
    fleet workers=4
    prompts 200 rate=20 text=own*:512..2048 output=50..150
    play ttft random
    ----
    policy   lost    hit  requests  least  uneven  ttft_ms
    ttft        0   0.00      1.04   0.92    1.17       54
    random      0   0.00      1.20   0.64    1.77       67

    bound uneven < 1.4 held by ttft broken by random

A story is played in virtual time, with the router's real core (simulator/world/world.py), once for
each policy, and with the laws of conservation checked if it says so. `#` begins a comment. Commands
print what stands after `----`, up to an empty line. A number may be off by a tenth, or by 0.05, so
that only changes that mean something show. Written again with
KVROUTE_REWRITE=1 python -m pytest tests/router/test_scenarios.py : read the diff, and commit only
what you understand and want. Bounds are never rewritten.

Commands (seconds, tokens; N..M: drawn evenly from it; from=S: 0 s unless told):
- fleet KEY=VALUE...: another fleet and another story; keys are fields of RunOptions, of its routing
  or of its scheduler; yes and no for flags.
- prompts N rate=R text=T output=N [from=S] [model=M] [ids=N]: N requests, R a second at random
  times; of a text, pieces of 512 tokens are shared or not, or of another number of ids.
  text: parts NAME:TOKENS, each the next 512s of what its name stands for, the last part any length.
  A name with * is another one for each request.
- sessions N turns=N rate=R text=T grow=N think=S output=N [from=S]: sessions that begin so; each
  turn's prompt is the one before it and `grow` tokens more (512s), sent `think` s after its answer.
- others N worker=I rate=R text=T output=N [from=S]: requests that somebody sends to one worker,
  past the router. They are in no number but through what they do to ours.
- restart I at=S down=S: an engine dies, and comes back empty.
- watch I from=S until=S: a worker, for the column `watched`.
- play POLICY... [as=NAME]: plays it; the policy `longest` takes most overlap and looks at nothing
  else, and `random` any worker.
- bound NUMBER <|> VALUE held by POLICY... [broken by POLICY...]: of the last play. VALUE may be
  FACTOR*NAME: so many times what the policy had in that play. `broken by` are those that show what
  the bound is for: it is a mistake if they keep it.

Numbers, over all requests that were served; loads are shares of the mean over workers:
- lost: requests that were not served.
- hit: cached / all prompt tokens.
- home: turns that went to the worker of the turn before (only with sessions).
- requests, least: the most and the fewest requests of a worker.
- uneven: the most requests in flight on a worker, summed over time.
- watched: what the watched worker got of the requests that came in its time.
- ttft_ms: mean time to the first token.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from router.config.settings.routing_settings import RoutingSettings
from router.request.prompt import Prompt
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import SchedulerConfig, Submission
from simulator.traffic.results import NO_WORKER, Outcome, RunResult, share
from simulator.traffic.trace import ID_TOKENS, Trace, TraceRequest
from simulator.world.options import Failure, RunOptions
from simulator.world.virtual_fleet import Worker
from simulator.world.world import World
from tests.stage import script
from tests.stage.script import REWRITE, typed, words_of

LONGEST = "tests.router.decide.policies.own_policies:longest_overlap"
RANDOM = "simulator.world.yardsticks:random"
YARDSTICKS = {"longest": LONGEST, "random": RANDOM}
"""Policies that no router has by name."""
SLICE_S = 0.1
"""How often loads are looked at."""

_DIGITS = {"lost": 0, "ttft_ms": 0}

Numbers = dict[str, float]
Options = dict[str, str]


@dataclass
class Others:
    """Requests past the router."""

    worker: int
    requests: list[TraceRequest]


@dataclass
class Watched:
    """A worker in a span of time."""

    worker: int
    from_s: float
    until_s: float


@dataclass
class Story:
    """What is going to happen."""

    options: Options
    rng: random.Random
    requests: list[TraceRequest] = field(default_factory=list)
    others: list[Others] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    watched: Watched | None = None
    texts: int = 0
    """That were made; what makes a name with * another one each time."""

    def play(self, policy: str) -> Numbers:
        """One run of it."""
        options = run_options(self.options, policy, self.failures)
        requests = sorted(self.requests, key=lambda request: request.arrival_s)
        world = World(options, Trace("story", requests))
        for number, others in enumerate(self.others):
            self._plan(world, others, f"others-{number}")
        return numbers(world.run(), requests, self.watched)

    def _plan(self, world: World, others: Others, name: str) -> None:
        size = world.options.scheduler.block_size
        worker = world.fleet.workers[others.worker]
        for number, request in enumerate(others.requests):
            hashes = request.block_hashes(size)
            names = Prompt.from_hashes(hashes, size, request.prompt_tokens).prefixes(size).tolist()
            request_id = f"{name}-{number}"
            submission = Submission(
                request_id=request_id,
                content=ChainContent(names, request_id),
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
            )
            world.timeline.at(request.arrival_s, partial(_send, world, worker, submission))


class Player:
    """Carries out the commands of one file."""

    def __init__(self) -> None:
        self._story: Story | None = None
        self._played: dict[str, Numbers] = {}
        self._named: dict[str, dict[str, Numbers]] = {}

    @property
    def story(self) -> Story:
        if self._story is None:
            raise ValueError("a story begins with `fleet`")
        return self._story

    def play(self, line: str) -> str:
        """What a command prints."""
        verb, names, options = words_of(line)
        match verb:
            case "fleet":
                self._story = Story(options, random.Random("story"))
            case "prompts":
                self.story.requests += self._prompts(int(names[0]), options)
            case "sessions":
                self.story.requests += self._sessions(int(names[0]), options)
            case "others":
                requests = list(self._prompts(int(names[0]), options))
                self.story.others.append(Others(int(options["worker"]), requests))
            case "restart":
                at_s, down_s = float(options["at"]), float(options["down"])
                self.story.failures.append(Failure(at_s, int(names[0]), down_s))
            case "watch":
                from_s, until_s = float(options["from"]), float(options["until"])
                self.story.watched = Watched(int(names[0]), from_s, until_s)
            case "play":
                self._played = {policy: self.story.play(policy) for policy in names}
                self._named[options.get("as", "")] = self._played
                return table(self._played)
            case "bound":
                self._bound(names)
            case _:
                raise ValueError(f"no such command: {line}")
        return ""

    def _prompts(self, count: int, options: Options) -> Iterator[TraceRequest]:
        size = int(options.get("ids", ID_TOKENS))
        for arrival_s in self._arrivals(count, options):
            hash_ids, tokens = self._text(options["text"], size)
            yield TraceRequest(
                arrival_s,
                tokens,
                int(self._drawn(options["output"])),
                np.array(hash_ids, np.uint64),
                id_tokens=size,
                model=options.get("model"),
            )

    def _sessions(self, count: int, options: Options) -> Iterator[TraceRequest]:
        for arrival_s in self._arrivals(count, options):
            hash_ids, tokens = self._text(options["text"])
            session_id = f"session {self.story.texts}"
            think_s = None
            for turn in range(int(options["turns"])):
                if turn:
                    more, more_tokens = self._text(f"{session_id} {turn}:{options['grow']}")
                    hash_ids, tokens = hash_ids + more, tokens + more_tokens
                    think_s = self._drawn(options["think"])
                yield TraceRequest(
                    arrival_s,
                    tokens,
                    int(self._drawn(options["output"])),
                    np.array(hash_ids, np.uint64),
                    session_id,
                    turn,
                    think_s,
                )

    def _arrivals(self, count: int, options: Options) -> list[float]:
        """So many times at random, as if nobody knew of one another."""
        now_s, rate = float(options.get("from", "0")), float(options["rate"])
        found = []
        for _ in range(count):
            now_s += self.story.rng.expovariate(rate)
            found.append(now_s)
        return found

    def _text(self, told: str, size: int = ID_TOKENS) -> tuple[list[int], int]:
        """Ids of a text, and its tokens."""
        self.story.texts += 1
        hash_ids: list[int] = []
        tokens = 0
        for part in told.split(","):
            if tokens % size:
                raise ValueError(f"{told}: only the last part may end within {size} tokens")
            name, _, length = part.partition(":")
            name = name.replace("*", f" {self.story.texts}")
            own_tokens = int(self._drawn(length))
            hash_ids += [
                xxh3_64_intdigest(f"{name} {i}".encode()) >> 9
                for i in range(-(-own_tokens // size))
            ]
            tokens += own_tokens
        return hash_ids, tokens

    def _drawn(self, told: str) -> float:
        """A number, or one of a range."""
        least, _, most = told.partition("..")
        return self.story.rng.uniform(float(least), float(most)) if most else float(least)

    def _bound(self, words: list[str]) -> None:
        number, sign, told, *rest = words
        sides = " ".join(rest).removeprefix("held by").partition("broken by")
        if sign not in ("<", ">"):
            raise ValueError(f"a bound is < or >, not {sign}")
        for policies, is_kept in ((sides[0].split(), True), (sides[2].split(), False)):
            for policy in policies:
                found = self._played[policy][number]
                value = self._value(told, policy, number)
                kept = found < value if sign == "<" else found > value
                verb = "breaks" if is_kept else "keeps"
                assert kept == is_kept, f"{policy} {verb} {number} {sign} {value:.3f}: {found:.3f}"

    def _value(self, told: str, policy: str, number: str) -> float:
        factor, _, name = told.partition("*")
        return float(factor) * (self._named[name][policy][number] if name else 1.0)


def _send(world: World, worker: Worker, submission: Submission) -> None:
    world.fleet.submit(worker, submission)


def run_options(told: Options, policy: str, failures: list[Failure]) -> RunOptions:
    """Of a fleet's line; raises TypeError for keys that nobody has."""
    settings: dict[type, dict[str, Any]] = {
        RunOptions: {},
        RoutingSettings: {},
        SchedulerConfig: {},
    }
    for key, value in told.items():
        kind = next((one for one in settings if key in one.__annotations__), RunOptions)
        settings[kind][key] = typed(value)
    scheduler = {"block_count": 4096, "block_size": 64, "joined_steps_max": 10_000}
    return RunOptions(
        policy=YARDSTICKS.get(policy, policy),
        routing=RoutingSettings(own_policies=(LONGEST, RANDOM), **settings[RoutingSettings]),
        scheduler=SchedulerConfig(**{**scheduler, **settings[SchedulerConfig]}),
        failures=tuple(failures),
        **settings[RunOptions],
    )


def numbers(run: RunResult, requests: list[TraceRequest], watched: Watched | None) -> Numbers:
    """What a run is judged by."""
    served = run.outcome == Outcome.SERVED
    found: Numbers = {}
    found["lost"] = len(requests) - int(served.sum())
    found["hit"] = share(run.cached_tokens[served], run.prompt_tokens[served])
    homes = home_turns(run, requests)
    if homes:
        found["home"] = sum(homes) / len(homes)
    counts = np.bincount(run.worker[served], minlength=len(run.workers))
    found["requests"] = counts.max() / counts.mean()
    found["least"] = counts.min() / counts.mean()
    found["uneven"] = uneven(run)
    if watched is not None:
        then = served & (watched.from_s <= run.arrival_s) & (run.arrival_s < watched.until_s)
        there = then & (run.worker == watched.worker)
        found["watched"] = there.sum() / then.sum() * len(run.workers)
    found["ttft_ms"] = 1e3 * float(np.nanmean(run.ttft_s))
    return found


def home_turns(run: RunResult, requests: list[TraceRequest]) -> list[bool]:
    """Of each turn but the first: whether it went to the worker of the one before it."""
    last: dict[str, int] = {}
    found = []
    for request, worker in zip(requests, run.worker.tolist(), strict=True):
        if request.session_id is None or worker == NO_WORKER:
            continue
        if request.session_id in last:
            found.append(last[request.session_id] == worker)
        last[request.session_id] = worker
    return found


def uneven(run: RunResult) -> float:
    """Most requests in flight on a worker / mean over workers, both summed over time."""
    ends_s = run.arrival_s + run.e2e_s
    at_s = np.arange(run.arrival_s.min(), ends_s.max(), SLICE_S)[:, np.newaxis]
    there = (run.arrival_s <= at_s) & (at_s < ends_s)
    loads = there.astype(int) @ (run.worker[:, np.newaxis] == np.arange(len(run.workers)))
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def table(played: dict[str, Numbers]) -> str:
    """A line a policy."""
    columns = list(next(iter(played.values())))
    width = max(len(policy) for policy in ("policy", *played))
    heads = (f"{name:>{_width(name)}}" for name in columns)
    lines = [f"{'policy':{width}}  {'  '.join(heads)}"]
    for policy, found in played.items():
        cells = (f"{found[name]:{_width(name)}.{_DIGITS.get(name, 2)}f}" for name in columns)
        lines.append(f"{policy:{width}}  {'  '.join(cells)}")
    return "\n".join(lines)


def play(path: Path) -> None:
    """Plays a file and holds it against what it tells, or writes it again. Raises
    AssertionError."""
    text = path.read_text()
    played = "".join(script.played(text, Player().play))
    if os.environ.get(REWRITE):
        path.write_text(played)
        return
    pairs = zip_longest(text.splitlines(), played.splitlines(), fillvalue="")
    for number, (told, found) in enumerate(pairs, start=1):
        words = list(zip_longest(told.split(), found.split(), fillvalue=""))
        assert all(_alike(*pair) for pair in words), (
            f"{path.name}, line {number}: told {told!r}, found {found!r};"
            f" {REWRITE}=1 writes it again"
        )


def _alike(told: str, found: str) -> bool:
    """Whether two words are equal, or numbers that hardly differ."""
    try:
        return isclose(float(told), float(found), rel_tol=0.1, abs_tol=0.05)
    except ValueError:
        return told == found


def _width(name: str) -> int:
    return max(len(name), 5)
