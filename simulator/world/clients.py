"""The clients of a run: they request a worker, send the request there, report, and try again.

    arrive -> route -> engine -> PREFILL_DONE at the first token -> FINISHED at the last token
                                 disaggregated: PREFILL_DONE when the prefill engine ends, then the
                                 decode engine, which was picked with it, or is picked now

Law: every request that arrived is in an engine, waits for another attempt, or has ended.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from router.decide.core.progress import Pick, Progress, ProgressState
from router.decide.decision.decision import Decision
from router.decide.policies.configured import that_watches
from router.fleet.reservations.reservations import Ending, Reservation
from router.observe.audit.shadow_policy import Shadow
from router.request.narrowing import Narrowing
from router.request.prompt import Prompt
from router.request.refusal import Reason, Refusal
from router.request.request import Objective, Request, Role, Wait
from simulator.engines.content import ChainContent, TokenContent, random_tokens
from simulator.engines.cost_model import Distance
from simulator.engines.scheduler import Content, Output, RequestRefused, Sequence, Submission
from simulator.traffic.trace import Trace, TraceRequest
from simulator.world.options import RunOptions
from simulator.world.run_record import Happened, RunRecord
from simulator.world.timeline import Timeline
from simulator.world.virtual_engine import VirtualEngine
from simulator.world.virtual_fleet import VirtualFleet, Worker
from simulator.world.virtual_router import VirtualRouter

BACKOFF_S = 0.1
BACKOFF_S_MAX = 2.0
"""Longest back-off, seconds. A wait is as in kvroute's client:
RetryInfo + uniform(0, min(max, backoff * 2^(failures - 1)))."""
CALLERS = 16
"""Number of hosts that send requests, by the addresses that routers see."""
WAITING_BYTES = 1024
"""Bytes of a request while it waits at a router; prompts are not counted."""
_UNAVAILABLE = (Reason.NO_WORKER, Reason.NO_ELIGIBLE_WORKER, Reason.DRAINING)


@dataclass(slots=True, eq=False)
class Life:
    """One request, as its client sees it."""

    index: int
    request: TraceRequest
    arrived_s: float
    prompt: Prompt
    content: Callable[[], Content]
    role: Role
    """The role of the worker that the request needs now."""
    losses: int = 0
    """Attempts that were lost with their worker."""
    refusals: int = 0
    router: VirtualRouter | None = None
    """The router that picked its worker; None: sent past the routers."""
    reservation_id: str = ""
    worker: Worker | None = None
    decodes_at: Worker | None = None
    """The decode worker, picked with the worker that computes its prompt."""
    prefilled_at: Worker | None = None
    """The worker from which its KV cache is fetched."""
    sequence: Sequence | None = None
    """The engine's sequence, while it is in an engine."""
    failed_workers: set[str] = field(default_factory=set)

    @property
    def request_id(self) -> str:
        """The id for router and engine: another for each attempt of each role."""
        return f"r{self.index}-{self.role}-{self.losses}"


@dataclass(slots=True, eq=False)
class Asking:
    """A request at a router: a Job of router/decide/core/admission.py."""

    clients: "Clients"
    life: Life
    router: VirtualRouter
    request: Request

    @property
    def request_id(self) -> str:
        """Id of the request, another for each attempt: see Life.request_id."""
        return self.request.request_id

    @property
    def owner(self) -> str:
        """Name of the caller's identity: empty, since no client needs a key."""
        return ""

    def decide(self, waited_s: float, may_exceed: bool) -> Reservation:
        """Reserves a worker for the request, and sends the request there; raises Refusal."""
        return self.clients.route(self.life, self.router, self.request, may_exceed).reservation

    def refuse(self, refusal: Refusal) -> None:
        """Called when the request leaves the queue without a worker."""
        self.clients.refused(self.life, refusal)


class Clients:
    """The clients of all requests of a trace. Call `start` first."""

    def __init__(
        self, timeline: Timeline, options: RunOptions, trace: Trace, record: RunRecord
    ) -> None:
        self.lives: dict[int, Life] = {}
        """Index in the trace -> request that has arrived and not ended"""
        policies, routing = options.policies(), options.routing
        self.shadows = {
            name: Shadow(that_watches(routing, policies[name]), routing.guard)
            for name in options.shadows
        }
        """Shadow policies: they score each request that is picked for, and change nothing."""
        self._timeline = timeline
        self._options = options
        self._requests = trace.requests
        self._record = record
        self._columns = record.columns
        self._rng = random.Random(f"{options.seed}/clients")
        self._next_turn = _next_turns(trace)
        self._turn = 0
        self._computing: dict[str, Life] = {}
        """Request id -> request in an engine"""

    def start(self, fleet: VirtualFleet) -> None:
        """Plans all arrivals that don't wait for another request."""
        self._fleet = fleet
        planned_later = set(self._next_turn.values())
        for index, request in enumerate(self._requests):
            if index not in planned_later:
                self._timeline.at(request.arrival_s, partial(self._arrive, index))

    def on_output(self, output: Output) -> None:
        """Reports a request's first or last token, which came from an engine."""
        life = self._computing.get(output.sequence.request_id)
        if life is None or life.sequence is not output.sequence:
            return
        if output.first == output.sequence.prompt_tokens:
            self._first_token(life)
        if output.finished:
            self._finish(life, output.sequence)

    def on_engine_died(self, engine: VirtualEngine) -> None:
        """Handles the death of an engine: its requests are lost, and sent again."""
        for life in list(self._computing.values()):
            if life.worker is not None and life.worker.engine is engine:
                self._lose(life)

    # --- to the engine ---

    def _first_role(self) -> Role:
        """The role of a request's first worker."""
        return Role.BOTH if self._options.disaggregation is None else Role.PREFILL

    def _arrive(self, index: int) -> None:
        request, now_s = self._requests[index], self._timeline.now_s
        columns = self._columns
        role = self._first_role()
        prompt, content = self._content(index, request)
        self.lives[index] = life = Life(index, request, now_s, prompt, content, role)
        self._record.arrived += 1
        columns.arrival_s[index] = now_s
        columns.prompt_tokens[index] = request.prompt_tokens
        if request.ttft_slo_s is not None:
            columns.ttft_slo_s[index] = request.ttft_slo_s
        if request.tpot_slo_s is not None:
            columns.tpot_slo_s[index] = request.tpot_slo_s
        if request.deadline_s is not None:
            columns.deadline_s[index] = request.deadline_s
        self._record.note(Happened.ARRIVED, now_s, index)
        self._timeline.quiet_since_s = None
        self._place(life)

    def _content(self, index: int, request: TraceRequest) -> tuple[Prompt, Callable[[], Content]]:
        """The prompt for the router, and its content for the engines' caches."""
        config, lora_name = self._options.scheduler, request.lora_name or ""
        if self._options.events == "engine":
            tokens = request.token_ids()
            whole = np.concatenate([tokens, random_tokens(index, request.output_tokens)])
            content = partial(TokenContent, whole, config, lora_name=lora_name)
            return Prompt.from_tokens(tokens.tobytes(), lora_name=lora_name), content
        size = config.block_size
        hashes = request.block_hashes(size)
        prompt = Prompt.from_hashes(hashes, size, request.prompt_tokens, lora_name=lora_name)
        names = prompt.prefixes(size).tolist()
        return prompt, partial(ChainContent, names, f"r{index}")

    def _place(self, life: Life) -> None:
        """Requests a worker from a router, and sends the request to it; or sends it past the
        routers."""
        options, now_s = self._options, self._timeline.now_s
        if options.past_router_share and self._rng.random() < options.past_router_share:
            self._record.counters["past_router"] += 1
            life.router = None
            able = [worker for worker in self._fleet.workers if self._serves(worker, life.role)]
            self._submit(life, self._rng.choice(able))
            return
        router = self._router()
        self._fleet.bring_up_to_date(router)
        apart = options.disaggregation
        as_pair = apart is not None and apart.picks == "pair" and life.role is Role.PREFILL
        request = Request(
            life.request_id,
            life.prompt,
            life.request.model or "",
            role=Role.PAIR if as_pair else life.role,
            policy=options.policy if as_pair else "",
            expected_output_tokens=life.request.output_tokens if options.output_hint else None,
            narrowing=Narrowing(
                lora_name=life.prompt.lora_name, excluded_workers=frozenset(life.failed_workers)
            ).or_none,
            tenant=life.request.tenant or "",
            session_id=life.request.session_id or "",
            objective=_objective(life),
        )
        asking = Asking(self, life, router, request)
        wait = _wait(life, now_s)
        try:
            waiter = router.admission.route(
                request, wait, now_s, WAITING_BYTES, lambda: asking, partial(asking.decide, 0.0)
            )
        except Refusal as refusal:
            self._on_refusal(life, refusal)
            return
        if waiter is not None:
            self._columns.waits[life.index] += 1
            self._timeline.at(waiter.expires_s, router.dispatch)
            router.dispatch()
            self._fleet.network.reserved(router)
            self._fleet.witness.on_turns(router, now_s)

    def route(self, life: Life, router: VirtualRouter, request: Request, may_exceed: bool) -> Pick:
        """Reserves a worker at a router, and sends the request there; raises Refusal."""
        options, now_s = self._options, self._timeline.now_s
        watch = self._watch if options.shadows else None
        pick = router.core.route(request, now_s, watch=watch, may_exceed=may_exceed)
        if not isinstance(pick, Pick):
            raise AssertionError(f"{life.request_id} is in flight already")
        self._record.counters["moved_by_guard"] += pick.decision.computing.guarded is not None
        self._fleet.network.reserved(router)
        self._fleet.witness.on_picked(router, pick.reservation.worker)
        reservation, computed = pick.reservation, pick.reservation.where_computed()
        life.router, life.reservation_id = router, reservation.id
        if life.role is not Role.DECODE:
            self._columns.predicted_tokens[life.index] = computed.predicted_tokens
            self._columns.wait_s[life.index] = now_s - life.arrived_s
        worker = self._fleet.worker(computed.worker)
        self._record.note(Happened.PICKED, now_s, life.index, worker.index)
        if request.role is Role.PAIR:
            life.role, life.decodes_at = Role.BOTH, None
            self._record.counters[f"pairs_{pick.decision.how}"] += 1
            if computed is not reservation:
                life.role, life.decodes_at = Role.PREFILL, self._fleet.worker(reservation.worker)
                self._record.note(Happened.PICKED, now_s, life.index, life.decodes_at.index)
        self._renew_later(life)
        self._submit(life, worker)
        return pick

    def _watch(self, decision: Decision) -> None:
        for shadow in self.shadows.values():
            shadow.watch(decision)

    def refused(self, life: Life, refusal: Refusal) -> None:
        """Handles a refusal of a request that waited at a router."""
        self._record.counters["displaced"] += refusal.reason is Reason.QUEUE_FULL
        self._on_refusal(life, refusal)

    def _router(self) -> VirtualRouter:
        routers = self._fleet.routers
        if self._options.spread == "random":
            return self._rng.choice(routers)
        self._turn += 1
        return routers[self._turn % len(routers)]

    def _serves(self, worker: Worker, role: Role) -> bool:
        return self._options.role_of(worker.engine.number) in (role, Role.BOTH)

    def _on_refusal(self, life: Life, refusal: Refusal) -> None:
        counters, now_s = self._record.counters, self._timeline.now_s
        counters["refusals"] += 1
        counters["queue_timeouts"] += refusal.reason is Reason.QUEUE_TIMEOUT
        counters["queue_full"] += refusal.reason is Reason.QUEUE_FULL
        self._record.note(Happened.REFUSED, now_s, life.index)
        after_s = refusal.retry_after_s
        life.refusals += 1
        retry_s = (after_s or 0.0) + self._backoff_s(life.refusals)
        can_wait = after_s is not None or refusal.reason in _UNAVAILABLE
        if can_wait and now_s + retry_s - life.arrived_s <= self._patience_s(life):
            counters["retries"] += 1
            self._timeline.at(now_s + retry_s, partial(self._place, life))
        elif after_s is None:
            self._fail(life, f"router: {refusal.reason}")
        else:
            self._record.turn_away(life.index)
            self._end(life)

    def _patience_s(self, life: Life) -> float:
        """Seconds from a request's arrival in which it is sent again; no longer than to its
        deadline."""
        deadline_s, patience_s = life.request.deadline_s, self._options.patience_s
        return patience_s if deadline_s is None else min(patience_s, deadline_s)

    def _backoff_s(self, failures: int) -> float:
        ceiling_s = min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(failures - 1, 10))
        return self._rng.uniform(0.0, ceiling_s)

    def _submit(self, life: Life, worker: Worker) -> None:
        life.worker = worker
        worker.in_flight += 1
        if not worker.engine.up:
            self._lose(life, Ending.FAILED_REFUSED)
            return
        request, source = life.request, life.prefilled_at
        fetches = life.role is Role.DECODE and source is not None
        submission = Submission(
            request_id=life.request_id,
            content=life.content(),
            prompt_tokens=request.prompt_tokens,
            output_tokens=1 if life.role is Role.PREFILL else request.output_tokens,
            priority=self._engine_priority(request),
            lora_name=request.lora_name or "",
            session_id=request.session_id,
            dp_rank=worker.rank if worker.engine.ranks > 1 else None,
            remote_tokens=request.prompt_tokens if fetches else 0,
            remote_distance=self._fleet.distance(source, worker) if source else Distance.RACK,
        )
        try:
            life.sequence = self._fleet.submit(worker, submission)
        except RequestRefused as refusal:
            self._report(life, ProgressState.FAILED, failure=Ending.FAILED_CLIENT)
            self._leave(life)
            self._fail(life, f"engine: {refusal}")
            return
        self._computing[life.request_id] = life

    def _engine_priority(self, request: TraceRequest) -> int | None:
        """A request's priority in the engine's direction; in a trace, higher is sooner."""
        priority = request.priority
        return None if priority is None else -priority * self._options.scheduler.priority_sign

    # --- from the engine ---

    def _first_token(self, life: Life) -> None:
        now_s = self._timeline.now_s
        if life.role is not Role.PREFILL:  # a prefill worker's token doesn't reach the client
            self._columns.ttft_s[life.index] = now_s - life.arrived_s
            self._record.note(Happened.FIRST_TOKEN, now_s, life.index)
        self._report(life, ProgressState.PREFILL_DONE)

    def _finish(self, life: Life, sequence: Sequence) -> None:
        columns, index, worker = self._columns, life.index, life.worker
        now_s, cached, output = self._timeline.now_s, sequence.cached_tokens, sequence.output_tokens
        if worker is None or cached is None or sequence.scheduled_s is None:
            raise AssertionError(f"{life.request_id} ends, but never began")
        self._fleet.witness.on_finished(sequence)
        columns.preemptions[index] += sequence.preemptions
        if life.role is not Role.DECODE:
            columns.queue_s[index] = sequence.scheduled_s - life.arrived_s
            columns.cached_tokens[index] = cached
            columns.worker[index] = worker.index
        decodes_at = life.decodes_at
        life.decodes_at = None
        if decodes_at is not None:
            self._report(life, ProgressState.PREFILL_DONE, cached_tokens=cached)
        else:
            self._report(life, ProgressState.FINISHED, output, cached)
        self._leave(life)
        if life.role is Role.PREFILL:
            self._record.note(Happened.HANDED_OVER, now_s, index)
            life.role, life.prefilled_at = Role.DECODE, worker
            if decodes_at is not None:
                self._submit(life, decodes_at)
            else:  # once the step of its engine is over, which others that wait may get now
                self._timeline.at(now_s, partial(self._place, life))
            return
        columns.output_tokens[index] = output
        columns.e2e_s[index] = now_s - life.arrived_s
        if output > 1:
            columns.itl_s[index] = (columns.e2e_s[index] - columns.ttft_s[index]) / (output - 1)
        self._record.serve(index)
        self._end(life)

    def _lose(self, life: Life, failure: Ending = Ending.FAILED_WORKER) -> None:
        """Handles the loss of a request's worker: the client gets an error, and sends the request
        again, resends_max times at most."""
        worker = life.worker
        if worker is None:
            raise AssertionError(f"{life.request_id} is lost, but was at no worker")
        self._report(life, ProgressState.FAILED, failure=failure)
        self._leave(life)
        life.losses += 1
        if life.losses > self._options.resends_max:
            self._fail(life, "worker lost")
            return
        life.failed_workers = {worker.engine.engine_id}
        life.role, life.decodes_at, life.prefilled_at = self._first_role(), None, None
        self._record.counters["resent"] += 1
        retry_s = self._backoff_s(life.losses)
        self._timeline.at(self._timeline.now_s + retry_s, partial(self._place, life))

    def _leave(self, life: Life) -> None:
        """Takes a request from its worker."""
        self._computing.pop(life.request_id, None)
        if life.worker is not None:
            life.worker.in_flight -= 1
        life.worker = life.sequence = None

    def _fail(self, life: Life, reason: str) -> None:
        self._columns.e2e_s[life.index] = self._timeline.now_s - life.arrived_s
        self._record.fail(life.index, reason)
        self._end(life)

    def _end(self, life: Life) -> None:
        """Ends a request in any outcome; its client plans the session's next turn."""
        columns, now_s = self._columns, self._timeline.now_s
        columns.losses[life.index] = life.losses
        self._record.note(Happened.ENDED, now_s, life.index, int(columns.outcome[life.index]))
        del self.lives[life.index]
        if not self.lives:
            self._timeline.quiet_since_s = now_s
        following = self._next_turn.get(life.index)
        if following is not None:
            think_s = self._requests[following].think_s or 0.0
            self._timeline.at(now_s + think_s, partial(self._arrive, following))

    def _report(
        self,
        life: Life,
        state: ProgressState,
        output_tokens: int = 0,
        cached_tokens: int | None = None,
        failure: Ending = Ending.FAILED_UNKNOWN,
    ) -> None:
        if life.router is None:
            return
        now_s = self._timeline.now_s
        life.router.hear(now_s)
        progress = Progress(life.reservation_id, state, output_tokens, cached_tokens, failure)
        life.router.core.report(progress, now_s, f"client-{life.index % CALLERS}")
        self._fleet.network.reserved(life.router)
        if len(life.router.admission):  # once the engine's step is over that brought this about
            self._timeline.at(now_s, life.router.dispatch)

    def _renew_later(self, life: Life) -> None:
        when_s = self._timeline.now_s + self._options.routing.lease_s / 3
        self._timeline.at(when_s, partial(self._renew, life, life.reservation_id))

    def _renew(self, life: Life, reservation_id: str) -> None:
        """Renews the lease of a long request."""
        if life.sequence is not None and life.reservation_id == reservation_id:
            self._report(life, ProgressState.RUNNING, life.sequence.output_tokens)
            self._renew_later(life)


def _wait(life: Life, now_s: float) -> Wait:
    """The terms of a request's wait in a router's queue, by its caller: priority, deadline,
    TTFT."""
    request, waited_s = life.request, now_s - life.arrived_s
    slo_s, deadline_s = request.ttft_slo_s, request.deadline_s
    return Wait(
        priority=request.priority or 0,
        deadline_s=inf if deadline_s is None else life.arrived_s + deadline_s,
        ttft_slo_s=None if slo_s is None else slo_s - waited_s,
    )


def _objective(life: Life) -> Objective | None:
    """The latency objectives that a request's caller names; None: the caller names none."""
    request = life.request
    if request.ttft_slo_s is None and request.tpot_slo_s is None:
        return None
    due_s = inf if request.ttft_slo_s is None else life.arrived_s + request.ttft_slo_s
    sheddable = (request.priority or 0) < 0
    return Objective(request.ttft_slo_s, due_s, request.tpot_slo_s, sheddable)


def _next_turns(trace: Trace) -> dict[int, int]:
    """Request -> the next request of its session, which is sent after its end; a session's first
    request follows none."""
    following: dict[int, int] = {}
    last: dict[str, int] = {}
    for index, request in enumerate(trace.requests):
        if request.session_id is None:
            continue
        if request.think_s is not None and request.session_id in last:
            following[last[request.session_id]] = index
        last[request.session_id] = index
    return following
