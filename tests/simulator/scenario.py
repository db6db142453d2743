"""Scenario files: stories of an engine's scheduler, as commands and what they print.

    # Two prompts, room for one batch of 100 tokens.
    engine block_count=64 step_tokens_max=100
    add A prompt=80 output=2
    begin
    ----
    scheduled A:80 = 80
    running A
    waiting -

A command is one line; after `----` comes what it prints, up to an empty line; without it, it must
print `ok`. `#` begins a comment.
Written again with  KVROUTE_REWRITE=1 python -m pytest tests/simulator/schedulers : read the diff,
and commit only what you understand and want.

Commands (times in seconds; every request has a name):
- engine KEY=VALUE...: a new engine; keys are the fields of its configuration.
- add NAME prompt=N output=N [text=T] [KEY=VALUE...]: a request comes; other keys are fields of
  `Submission`. text: what the prompt consists of, in blocks: `sys:16,x` begins with 16 blocks of
  the text `sys`, the rest is the text `x`. Default: its own name.
- place STATE NAME prompt=N output=N [text=T] [KEY=VALUE...]: a request that is there already; what
  states there are, and with which keys, says the engine's own test.
- begin: a step begins; prints whom it computes, with tokens, the batch, and who waits.
- end: it ends; prints new tokens by request, and how many blocks were stored and removed.
- step: both.  run [N]: N steps, or until there is nothing left; prints one line a step.
- advance S, cut S, wait S: time passes within a run of joined steps, or while the engine is idle.
- state: what else an engine is made of; what it prints says the engine's own test.
- abort NAME.  show [NAME...]: where requests stand.  load FIELD...: fields of `Load`.  blocks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from simulator.engines.block_pool import PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.scheduler import (
    RequestRefused,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepResult,
    Submission,
)
from tests.stage import script
from tests.stage.script import REWRITE, typed, words_of

FOLDER = Path(__file__).parent / "scenarios"

Options = dict[str, str]
Place = Callable[[Any, str, Submission, Options], Sequence | None]
"""(scheduler, state, submission, further keys): puts a request into a state; None: it left only
its blocks in the cache."""


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """What a scenario needs to know about an engine."""

    config: type[SchedulerConfig]
    make: Callable[[Any], Scheduler]
    place: Place | None = None
    state: Callable[[Any], str] | None = None
    """Prints what only this engine has."""


class Player:
    """Carries out the commands of one file."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._kind = engine
        self._scheduler: Scheduler | None = None
        self._sequences: dict[str, Sequence] = {}
        self._now_s = 0.0

    def play(self, line: str) -> str:
        """What a command prints."""
        verb, names, options = words_of(line)
        match verb:
            case "engine":
                return self._new_engine(options)
            case "add":
                return self._add(names[0], options)
            case "place":
                return self._place(names[0], names[1], options)
            case "begin":
                return self._begin()
            case "end":
                return self._end()
            case "step":
                return f"{self._begin()}\n{self._end()}"
            case "run":
                return self._run(int(names[0]) if names else None)
            case "advance":
                self._now_s += float(names[0])
                return _told(self.scheduler.advance(self._now_s))
            case "cut":
                self._now_s += float(names[0])
                step = self.scheduler.cut_step(self._now_s)
                return f"{step.count if step else 0} steps"
            case "wait":
                self._now_s += float(names[0])
                return "ok"
            case "abort":
                return "aborted" if self.scheduler.abort(self._sequences[names[0]]) else "gone"
            case "show":
                return "\n".join(self._show(name) for name in names or self._sequences)
            case "load":
                load = self.scheduler.load()
                return " ".join(f"{name}={getattr(load, name)}" for name in names)
            case "state":
                if self._kind.state is None:
                    raise ValueError("this engine has no `state`")
                return self._kind.state(self.scheduler)
            case "blocks":
                counts = self.scheduler.blocks()
                return f"free={counts.free} cached={counts.cached} in_use={counts.in_use}"
            case _:
                raise ValueError(f"no such command: {line}")

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise ValueError("a scenario begins with `engine`")
        return self._scheduler

    def _new_engine(self, options: Options) -> str:
        config = self._kind.config(**_typed(self._kind.config, options))
        self._scheduler = self._kind.make(config)
        self._sequences.clear()
        self._now_s = 0.0
        return "ok"

    def _add(self, name: str, options: Options) -> str:
        try:
            self._sequences[name] = self.scheduler.add(self._submission(name, options), self._now_s)
        except RequestRefused as error:
            return f"refused: {error}"
        return "ok"

    def _place(self, state: str, name: str, options: Options) -> str:
        if self._kind.place is None:
            raise ValueError("this engine has no `place`")
        known = {one.name for one in fields(Submission)} | {"prompt", "output", "text"}
        own = {key: value for key, value in options.items() if key in known}
        rest = {key: value for key, value in options.items() if key not in known}
        submission = self._submission(name, own)
        sequence = self._kind.place(self.scheduler, state, submission, rest)
        if sequence is not None:
            self._sequences[name] = sequence
        return "ok"

    def _submission(self, name: str, options: Options) -> Submission:
        options = dict(options)
        prompt, output = int(options.pop("prompt")), int(options.pop("output", "1"))
        blocks = (prompt + output) // self.scheduler.config.block_size
        content = ChainContent(_chain(options.pop("text", name), blocks), name)
        return Submission(
            request_id=name,
            content=content,
            prompt_tokens=prompt,
            output_tokens=output,
            **_typed(Submission, options),
        )

    def _begin(self) -> str:
        scheduler = self.scheduler
        step = scheduler.begin_step(self._now_s)
        if step is None:
            return f"nothing to compute\nwaiting {_names(scheduler.waiting())}"
        computed = scheduler.scheduled()
        tokens = " ".join(f"{sequence.request_id}:{count}" for sequence, count in computed)
        joined = f", {step.count} steps" if step.count > 1 else ""
        return (
            f"scheduled {tokens} = {sum(count for _, count in computed)}{joined}\n"
            f"running {_names(scheduler.running())}\n"
            f"waiting {_names(scheduler.waiting())}"
        )

    def _end(self) -> str:
        step = self.scheduler.step
        if step is None:
            return "no step"
        self._now_s = step.end_s
        return _told(self.scheduler.end_step(self._now_s))

    def _run(self, steps: int | None) -> str:
        lines: list[str] = []
        while steps is None or len(lines) < steps:
            begun = self._begin().splitlines()
            if self.scheduler.step is None:
                break
            lines.append(f"{begun[0]} | {self._end()}")
        return "\n".join(lines) or "nothing to compute"

    def _show(self, name: str) -> str:
        sequence = self._sequences[name]
        scheduler = self.scheduler
        if sequence in scheduler.running():
            state = "running"
        elif sequence in scheduler.waiting():
            state = "waiting"
        else:
            state = "ended"
        preempted = f", preempted {sequence.preemptions}x" if sequence.preemptions else ""
        return (
            f"{name} {state}, {sequence.computed_tokens} of {sequence.known_tokens} computed, "
            f"{len(sequence.blocks)} blocks{preempted}"
        )


def play(path: Path, engine: EngineUnderTest) -> None:
    """Plays a file and compares, or writes it again. Fails at the first difference."""
    player, text = Player(engine), path.read_text()
    played = "".join(script.played(text, player.play, silent="ok"))
    if os.environ.get(REWRITE):
        path.write_text(played)
        return
    assert played == text, f"{path.name} differs; {REWRITE}=1 writes it again"


def _chain(text: str, block_count: int) -> list[int]:
    """Names of blocks that mean the same text from the beginning on."""
    chain: list[int] = []
    parent = 0
    for part in text.split(","):
        name, _, count = part.partition(":")
        for i in range(int(count) if count else block_count - len(chain)):
            parent = xxh3_64_intdigest(f"{name} {i}".encode(), parent)
            chain.append(parent)
    return chain[:block_count]


def _typed(kind: Any, options: Options) -> dict[str, Any]:
    """Values as a dataclass's fields want them."""
    lists = {one.name for one in fields(kind) if "tuple" in str(one.type)}
    return {
        key: tuple(value.split(",")) if key in lists else typed(value)
        for key, value in options.items()
    }


def _names(sequences: list[Sequence]) -> str:
    return " ".join(one.request_id for one in sequences) or "-"


def _told(result: StepResult) -> str:
    tokens = " ".join(
        f"{one.sequence.request_id}+{one.last - one.first}{'.' if one.finished else ''}"
        for one in result.outputs
    )
    return f"out {tokens or '-'}; {_events(result.events)}"


def _events(events: list[PoolEvent]) -> str:
    stored = sum(len(one.hashes) for one in events if isinstance(one, Stored))
    removed = sum(len(one.hashes) for one in events if isinstance(one, Removed))
    return f"stored {stored}, removed {removed}"
