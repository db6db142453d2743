"""Makes the tokens of one process's prompts that came as text or as a body. Child processes make
the router's own tokens, engines make theirs, and comparisons prove the children's.

    body -> a child's tokens, if their shape is proven
         -> else an engine's tokens, compared with the child's
         -> else an estimate of the length

Laws:
- tokens are called verified only if their shape is proven, if a configured render service gave
  them, or if the engine that gave them is the one that the request goes to;
- an engine's answer delays a request by ASK_S at most, unless its caller requires tokens, and
  refuses none;
- a prompt without tokens ends with an estimate and a reason, or, where its caller requires tokens
  or the body itself is wrong, with PromptError; no other exception leaves `tokens_of`;
- a reservation's token count is compared with the count in its answer once at most;
- tokens of a configuration that is no longer in force prove nothing and bar nothing; a prompt whose
  rendering a reload ends is rendered again.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

import msgspec
from xxhash import xxh3_64_intdigest

from events.engines.access import EngineAccess
from router.request.bodies import BodyFormat
from router.request.dialects.table import DEFAULT
from router.request.prompt_error import PromptError
from router.request.prompt_processes.children import Children
from router.request.prompt_processes.frames import Done
from router.request.prompt_settings import CACHE_BYTES, MEMORY_BYTES, RendererSettings
from router.request.proving.canaries import canaries
from router.request.proving.engine_tokens import (
    ASK_S,
    EngineAway,
    EngineLacks,
    EngineRefused,
    Engines,
    EngineTokens,
    Item,
)
from router.request.proving.proof import Difference, Proof, State, Target
from router.request.refusal import Reason

BYTES_A_TOKEN = 4
"""Bytes of a body that an estimate counts as one token."""
REMEMBERED_MAX = 65_536
"""Most reservations that are remembered until the token count of their answer is compared."""
WORKERS_MAX = 4096
"""Most workers remembered as having run canaries, past which the oldest one's run again, and as
lacking /tokenize."""
CANARIES_MAX = 2
"""Most workers whose canaries run at once: children and engines have clients' prompts to do, too.
"""
CANARIES_AGAIN_S = 60.0
"""Seconds until canaries run again on a worker that gave tokens for none of them."""
AUDITS_MAX = 4
"""Most audits (comparisons of proven tokens with an engine's) at once; further ones are left out.
"""
AFFINITY_BYTES = 2048
"""Leading bytes of a body whose hash chooses the child process for it."""
REFUSED = frozenset((Reason.MALFORMED_BODY, Reason.TEMPLATE_REFUSED, Reason.PROMPT_TOO_LONG))
"""Reasons of a PromptError for which the request is refused, whether or not its caller requires
tokens: the body is at fault."""
ESTIMATED = frozenset(
    (
        Reason.UNSUPPORTED_CONTENT,
        Reason.NO_TOKENIZER,
        Reason.RENDERER_UNAVAILABLE,
        Reason.RENDER_QUEUE_FULL,
    )
)
"""Other reasons of a PromptError: the length is estimated, unless the caller requires tokens."""

Access = Callable[[str, str], EngineAccess]
log = logging.getLogger("kvroute.prompts")


class Source(StrEnum):
    """Configured source of a model's tokens: children where proven, else engines (auto); children
    alone (local); engines alone (engine); none (off)."""

    AUTO = "auto"
    LOCAL = "local"
    ENGINE = "engine"
    OFF = "off"


class MadeBy(StrEnum):
    """The source that made a prompt's tokens; its values are values of a metric's label."""

    LOCAL = "local"
    ENGINE = "engine"
    ESTIMATE = "estimate"


class ModelPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings by which one model's prompts become tokens."""

    source: Source = Source.AUTO
    renderer: RendererSettings | None = None
    """Settings of the children's rendering; None: children make no tokens for this model."""
    render: str = ""
    """HTTP base of a render service, which is called in place of workers; empty: none."""
    processes: int = 2
    memory_bytes: int = MEMORY_BYTES + CACHE_BYTES
    """Most address space of each child process, in bytes."""
    audit_share: float = 0.001
    """Share (0 to 1) of the prompts with proven tokens for which an engine's tokens are also
    fetched and compared, in the background."""


@dataclass(frozen=True, slots=True)
class EngineAt:
    """A worker whose engine can be called for tokens."""

    kind: str
    version: str
    address: str
    """http://host:port"""
    identity: str
    """Identity of the engine's present run: it differs after a restart."""
    model: str
    """The name by which the engine serves the model."""
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """A prompt without tokens, whose tokens are wanted."""

    model: str
    kind: BodyFormat
    content: bytes
    engine: EngineAt | None
    """None: no worker of the model can be reached now."""
    left_s: float = inf
    """Seconds until the caller's deadline; inf: it has none."""
    require: bool = False
    source: Source | None = None
    """Source that takes the place of the configured one; None: the configured source."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens made of a prompt, or an estimate of their number."""

    count: int
    made_by: MadeBy
    token_bytes: bytes = b""
    verified: bool = False
    digest: str = ""
    shape: str = ""
    reason: str = ""
    """Why there is only an estimate; empty: there are tokens."""
    items: tuple[Item, ...] = ()
    own: "Own | None" = None
    """The router's own token count, which is compared with the answer's; None: no comparison."""
    only_for: str = ""
    """Id of the worker whose engine made the tokens and for which alone they are certain; empty:
    they hold for all workers."""


@dataclass(frozen=True, slots=True)
class Own:
    """What a later comparison needs of the router's own tokens of a prompt: shape and count."""

    model: str
    target: Target
    shape: str
    usage_tokens: int


@dataclass(slots=True)
class _Case:
    """State of one `tokens_of` call: the prompt, and what is known so far of its tokens."""

    ask: PromptAsk
    settings: ModelPrompts
    target: Target
    own: Done | None = None
    """The child's result; None: there is none."""
    own_bytes: bytes = b""
    """The child's tokens."""
    failed: PromptError | None = None
    """The child's error; None: there is none."""
    shape: str = ""

    @property
    def worker_id(self) -> str:
        return self.ask.engine.worker_id if self.ask.engine is not None else ""


_DEFAULT = ModelPrompts()
"""Settings of a model that is not configured."""


class Prompts:
    """Makes the tokens of one process's prompts. Construct it in a running event loop; `close` ends
    it."""

    def __init__(
        self,
        models: Mapping[str, ModelPrompts],
        *,
        random_share: Callable[[], float] | None = None,
        access: Access | None = None,
    ) -> None:
        """models: settings by name; tokens of other models come from workers. random_share: returns
        a number from 0 to 1 for each prompt that may be audited. access: returns credentials for a
        worker by its id and address, or for a render service (no id); None: without keys.
        """
        self.proof = Proof()
        self.digests: dict[str, str] = {}
        """Digests of the tokenizers that were loaded, by model."""
        self.faults: dict[str, str] = {}
        """Why this process can't load a model's tokenizer, by model."""
        self.made: Counter[tuple[MadeBy, BodyFormat]] = Counter()
        self.estimates: Counter[tuple[str, BodyFormat]] = Counter()
        """Estimated prompts by reason."""
        self.unverified = 0
        """Prompts with the router's own tokens, of a shape that was not proven."""
        self.differences: Counter[str] = Counter()
        """Prompts whose tokens differed from the engine's, by model."""
        self.lacking: dict[tuple[str, str], str] = {}
        """Models and workers whose engines give no tokens at all -> why; the one that was noted
        longest ago goes first."""
        self.render_s = 0.0
        """Seconds that children have spent rendering, in sum."""
        self.renders = 0
        self.audits_left_out = 0
        self.models = dict(models)
        """Settings by model name, as configured."""
        self._children: dict[str, Children] = {}
        self._engines = Engines()
        self._access = access or (lambda _, base: EngineAccess(base))
        self._killed: Counter[str] = Counter()
        """Lost children of pools that are closed, by cause."""
        self._remembered: OrderedDict[str, tuple[Own, str]] = OrderedDict()
        """The router's own tokens by reservation, each with the id of its worker."""
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()
        """(model, identity of a worker's engine) whose canaries ran or run -> loop time after which
        they run again; inf: they don't."""
        self._canaries_open = asyncio.Semaphore(CANARIES_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._comparing: set[asyncio.Task[None]] = set()
        """Those of `_tasks` that compare tokens; `close` cancels them."""
        self._audits = 0
        self._random_share = random_share or random.Random().random

    @property
    def waiting(self) -> int:
        """Number of bodies that children render, or that wait for a child."""
        return sum(pool.waiting for pool in self._children.values())

    @property
    def answers_unusable(self) -> int:
        """Number of engines' answers that were unusable or came too late."""
        return self._engines.unusable

    @property
    def killed(self) -> Counter[str]:
        """Number of children killed or lost, by cause."""
        return sum((pool.killed for pool in self._children.values()), self._killed.copy())

    def configure(self, models: Mapping[str, ModelPrompts]) -> None:
        """Puts another configuration in force: canaries run again for every worker, and for models
        whose settings changed, proofs are dropped and children restarted. models: settings by name.
        """
        changed = [
            name
            for name in self.models.keys() | models.keys()
            if self.models.get(name) != models.get(name)
        ]
        pools = [pool for name in changed if (pool := self._children.pop(name, None)) is not None]
        for name in changed:
            self.proof.unprove(name)
            self.digests.pop(name, None)
            self.faults.pop(name, None)
        for reservation_id, (own, _) in list(self._remembered.items()):
            if own.model in changed:
                del self._remembered[reservation_id]
        self.models = dict(models)
        self._seen.clear()
        self.lacking.clear()
        for pool in pools:
            self._keep(asyncio.get_running_loop().create_task(self._end(pool)))

    async def close(self) -> None:
        """Ends the children and the open calls to engines."""
        for task in self._comparing:
            task.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        for pool in self._children.values():
            await pool.close()
        await self._engines.close()

    async def _end(self, pool: Children) -> None:
        """Ends children of an earlier configuration of their model, and keeps their kill counts."""
        await pool.close()
        self._killed.update(pool.killed)

    async def tokens_of(self, ask: PromptAsk) -> PromptTokens:
        """The tokens of a prompt, or an estimate of its length. Raises PromptError if the body is
        at fault, or if its caller requires tokens and there are none."""
        try:
            made = await self._made(ask)
        except PromptError as error:
            return self.estimate(ask, error)
        self.made[made.made_by, ask.kind] += 1
        self.unverified += not made.verified
        return made

    def estimate(self, ask: PromptAsk, error: PromptError) -> PromptTokens:
        """An estimate of a prompt's length after `error`, which is raised where no estimate may be
        made.
        """
        if ask.require or error.reason in REFUSED:
            try:
                raise error
            finally:
                del error  # a cycle: its traceback refers to this frame
        self.estimates[error.reason, ask.kind] += 1
        return PromptTokens(
            max(1, len(ask.content) // BYTES_A_TOKEN),
            MadeBy.ESTIMATE,
            digest=self.digests.get(ask.model, ""),
            shape=error.shape,
            reason=str(error),
        )

    def on_pick(self, reservation_id: str, made: PromptTokens, worker_id: str = "") -> PromptTokens:
        """Records the worker of a prompt, to compare the answer's token count later. Returns
        `made`, marked unverified if the worker is odd (see Proof), or if the tokens are certain for
        another worker alone."""
        own = made.own
        if made.only_for and made.only_for != worker_id:
            made = replace(made, verified=False)
        if own is not None:
            if self.proof.odd(own.model, own.target, worker_id):
                made = replace(made, verified=False)
            self._remembered[reservation_id] = own, worker_id
            while len(self._remembered) > REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return made

    def on_answer(self, reservation_id: str, prompt_tokens: int) -> None:
        """Compares the prompt tokens that an answer reports with the router's own count, if
        `on_pick` recorded the reservation."""
        remembered = self._remembered.pop(reservation_id, None)
        if remembered is None:
            return
        own, worker_id = remembered
        known = self.proof.state(own.model, own.target, own.shape) is State.BARRED or bool(
            self.proof.odd(own.model, own.target, worker_id)
        )
        difference = self.proof.count(
            own.model, own.target, own.shape, own.usage_tokens, prompt_tokens, worker_id
        )
        if difference is not None and known:  # no news, such as of a request sent before
            self.differences[own.model] += 1
        elif difference is not None:
            self._differs(own.model, own.target, own.shape, difference)

    def rests(self, engine: EngineAt) -> bool:
        """Whether an engine gets no calls for tokens for a while, since its last answers were
        unusable."""
        return self._engines.rests(engine.address)

    def _note_lacking(self, model: str, engine: EngineAt, why: str) -> None:
        self.lacking.pop((model, engine.worker_id), None)
        self.lacking[model, engine.worker_id] = why
        if len(self.lacking) > WORKERS_MAX:
            del self.lacking[next(iter(self.lacking))]

    def is_odd(self, model: str, engine: EngineAt) -> bool:
        """Whether a worker makes other tokens than others with the same engine and version."""
        return bool(self.proof.odd(model, _target(engine), engine.worker_id))

    async def _made(self, ask: PromptAsk) -> PromptTokens:
        """The tokens of a prompt from the source in force. Raises PromptError if there are none."""
        settings = self.models.get(ask.model, _DEFAULT)
        source = ask.source or settings.source
        if source is Source.OFF:
            raise PromptError(
                Reason.NO_TOKENIZER,
                "this router makes no tokens for the model (prompts.source is off)",
            )
        if ask.engine is not None:
            self._see(ask.model, settings, ask.engine)
            if source is Source.AUTO and self.is_odd(ask.model, ask.engine):
                source = Source.ENGINE  # the others are away, or it would be passed over
        case = _Case(ask, settings, _target(ask.engine))
        if source is not Source.ENGINE:
            try:
                case.own, case.own_bytes = await self._own(ask, settings)
                case.shape = self.proof.shape(ask.model, case.own.shape)
            except PromptError as error:
                if not self._in_force(ask.model, settings):  # a reload ended its process, say
                    return await self._made(ask)
                if source is Source.LOCAL:
                    raise
                case.failed = error.with_traceback(None)  # its frames have the case: a cycle
        state = self._state(case)
        if case.own is not None and (state is State.PROVEN or source is Source.LOCAL):
            if state is State.PROVEN:
                self._audit(case)
            return self._local(case, case.own)
        try:
            theirs = await self._theirs(ask, settings, inf if ask.require else ASK_S)
        except EngineRefused as error:
            return self._without_engine(case, f"the engine refuses the body: {error}")
        except EngineAway as error:
            if isinstance(error, EngineLacks) and ask.engine is not None:
                self._note_lacking(ask.model, ask.engine, str(error))
            return self._without_engine(case, str(error))
        if ask.engine is not None:
            self.lacking.pop((ask.model, ask.engine.worker_id), None)
        if not self._in_force(ask.model, settings):
            case.own = None  # the configuration changed meanwhile
        return self._of_engine(case, theirs)

    def _state(self, case: _Case) -> State:
        return self.proof.state(case.ask.model, case.target, case.shape)

    def _of_engine(self, case: _Case, theirs: EngineTokens) -> PromptTokens:
        """The result for tokens that an engine gave. They are compared with the router's own, if
        there are any and their shape is not barred."""
        model, own = case.ask.model, case.own
        if own is not None:
            self._compared(case, theirs.token_bytes)
        state = self._state(case)
        kept = own is not None and state is not State.BARRED
        for_all = self.models.get(model, _DEFAULT).render or (
            own is not None and case.own_bytes == theirs.token_bytes and state is State.PROVEN
        )
        return PromptTokens(
            len(theirs.token_bytes) // 4,
            MadeBy.ENGINE,
            theirs.token_bytes,
            verified=True,
            digest=self.digests.get(model, ""),
            shape=case.shape or (case.failed.shape if case.failed is not None else ""),
            items=theirs.items,
            own=Own(model, case.target, case.shape, own.usage_tokens) if own and kept else None,
            only_for="" if for_all else case.worker_id,
        )

    def _without_engine(self, case: _Case, why: str) -> PromptTokens:
        """The result where no engine gave tokens, for the reason `why`: the router's own tokens.
        Raises PromptError if there are none, or if their shape is barred."""
        if (failed := case.failed) is not None:
            message = failed.message
            if failed.reason not in REFUSED:
                message = f"{message}; and no engine gave the body's tokens: {why}"
            raise PromptError(failed.reason, message, failed.shape)
        if case.own is None or self._state(case) is State.BARRED:
            message = f"no engine gave tokens: {why}"
            if case.own is not None:
                message = f"the router's own tokens differed for such prompts, and {message}"
            raise PromptError(Reason.RENDERER_UNAVAILABLE, message, case.shape)
        return self._local(case, case.own)

    def _local(self, case: _Case, own: Done) -> PromptTokens:
        return PromptTokens(
            own.count,
            MadeBy.LOCAL,
            case.own_bytes,
            verified=self._state(case) is State.PROVEN,
            digest=own.digest,
            shape=case.shape,
            own=Own(case.ask.model, case.target, case.shape, own.usage_tokens),
        )

    async def _own(self, ask: PromptAsk, settings: ModelPrompts) -> tuple[Done, bytes]:
        """A child's result and tokens (little-endian u32); raises PromptError."""
        model = ask.model
        if settings.renderer is None:
            raise PromptError(
                Reason.NO_TOKENIZER,
                f"no tokenizer is configured for model {model!r} (models: prompts.folder)",
            )
        pool = self._children.get(model)
        if pool is None:
            pool = self._children[model] = Children(
                settings.processes, memory_bytes=settings.memory_bytes
            )
        affinity = xxh3_64_intdigest(ask.content[:AFFINITY_BYTES])
        try:
            done, token_bytes = await pool.render(
                model, settings.renderer, ask.kind, ask.content, _kind(ask.engine), affinity
            )
        except PromptError as error:
            if error.reason is Reason.NO_TOKENIZER and self._in_force(model, settings):
                self.faults[model] = error.message
            raise
        if self._in_force(model, settings):
            self.faults.pop(model, None)
            self.digests[model] = done.digest
        self.render_s += done.seconds
        self.renders += 1
        return done, token_bytes

    async def _theirs(
        self, ask: PromptAsk, settings: ModelPrompts, limit_s: float = inf
    ) -> EngineTokens:
        """Tokens from the prompt's engine or the render service, within limit_s seconds; raises
        EngineAway, EngineRefused."""
        if ask.engine is None and not settings.render:
            raise EngineAway("no worker of the model can be reached now")
        name = ask.engine.model if ask.engine is not None else ask.model
        engine = None if settings.render else ask.engine
        return await self._engines.ask(
            self._access(
                engine.worker_id if engine is not None else "",
                (engine.address if engine is not None else settings.render).rstrip("/"),
            ),
            _kind(ask.engine),
            ask.kind,
            ask.content,
            name,
            left_s=min(ask.left_s, limit_s),
            is_renderer=bool(settings.render),
        )

    def _see(self, model: str, settings: ModelPrompts, engine: EngineAt) -> None:
        """Starts the canaries of a worker on which they have not run, or are due again."""
        key = model, engine.identity
        if settings.renderer is None or settings.source is not Source.AUTO:
            return
        if key in self._seen and asyncio.get_running_loop().time() < self._seen[key]:
            return
        self._seen[key] = inf
        while len(self._seen) > WORKERS_MAX:
            self._seen.popitem(last=False)
        self._engines.forget(engine.address)
        self._compare_later(self._canaries(model, settings, engine))

    async def _canaries(self, model: str, settings: ModelPrompts, engine: EngineAt) -> None:
        """Compares a child's tokens of each canary with the engine's; leaves out a canary of which
        one of them gives no tokens."""
        outcomes: dict[str, list[tuple[bytes, bytes]]] = {}
        async with self._canaries_open:
            for kind, content in canaries(engine.model):
                if not self._in_force(model, settings):
                    return
                ask = PromptAsk(model, kind, content, engine)
                with suppress(PromptError, EngineAway, EngineRefused):
                    done, own = await self._own(ask, settings)
                    theirs = await self._theirs(ask, settings)
                    shape = self.proof.shape(model, done.shape)
                    outcomes.setdefault(shape, []).append((own, theirs.token_bytes))
        if not self._in_force(model, settings):
            return
        key = model, engine.identity
        if not outcomes and key in self._seen:
            self._seen[key] = asyncio.get_running_loop().time() + CANARIES_AGAIN_S
        differing = self.proof.canaries(model, _target(engine), outcomes, engine.worker_id)
        for target, shape, difference in differing:
            self._differs(model, target, shape, difference, engine.worker_id)

    def _in_force(self, model: str, settings: ModelPrompts) -> bool:
        """Whether the model's configuration is still this one."""
        return self.models.get(model, _DEFAULT) == settings

    def _audit(self, case: _Case) -> None:
        """Compares the proven tokens of a random share of prompts with the engine's, in the
        background."""
        if case.ask.engine is None or self._random_share() >= case.settings.audit_share:
            return
        if self._audits >= AUDITS_MAX:
            self.audits_left_out += 1
            return
        self._audits += 1
        self._compare_later(self._compare(case))

    async def _compare(self, case: _Case) -> None:
        try:
            theirs = await self._theirs(case.ask, case.settings)
        except (EngineAway, EngineRefused):
            self.audits_left_out += 1
            return
        finally:
            self._audits -= 1
        if self._in_force(case.ask.model, case.settings):
            self._compared(case, theirs.token_bytes)

    def _compared(self, case: _Case, engine: bytes) -> None:
        """Compares own tokens of a body with the engine's. Leaves out barred shapes, which canaries
        alone compare, since each prompt of such a shape would be logged."""
        if self._state(case) is State.BARRED:
            return
        of = case.ask.model, case.target, case.shape
        difference = self.proof.compare(*of, case.own_bytes, engine, case.worker_id)
        if difference is not None:
            self._differs(*of, difference)

    def _differs(
        self,
        model: str,
        target: Target,
        shape: str,
        difference: Difference,
        worker_id: str = "",
    ) -> None:
        self.differences[model] += 1
        then = "until canaries pass again, engines make the tokens of this shape"
        if self.proof.odd(model, target, worker_id):
            then = f"only worker {worker_id} differs, so its cached tokens can't be predicted"
        log.warning(
            "model %s: %s %s and the router make other tokens of a prompt of shape %s: %s; %s",
            *(model, target.engine, target.version, shape, described(difference), then),
        )

    def _compare_later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._comparing.add(task)
        task.add_done_callback(self._comparing.discard)
        self._keep(task)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("comparing the router's tokens with an engine's failed", exc_info=error)


def described(difference: Difference) -> str:
    """A difference as a phrase for a sentence: the place and both token ids, or both counts."""
    if difference.at is None:
        return f"{difference.engine} tokens by the answer's usage, {difference.own} by the router"
    return (
        f"the first difference is token {difference.at}, {difference.engine} of the engine and"
        f" {difference.own} of the router"
    )


def _kind(engine: EngineAt | None) -> str:
    return DEFAULT if engine is None else engine.kind


def _target(engine: EngineAt | None) -> Target:
    return Target("", "") if engine is None else Target(engine.kind, engine.version)
