"""The console of one router: a round a second for all viewers, and a point of history each 10 s.

Laws:
- without viewers no tile is written and no decision sampled;
- a fault of the console is counted and logged, and costs no request.
"""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import suppress

from router.decide.decision.decision import Decision
from router.decide.policies.policy import Policy
from router.decide.queue.views import sums
from router.observe.audit.sampling import Sampled
from router.observe.console.viewers import Viewer, Viewers
from router.observe.views.decisions import Decisions, ShownDecision
from router.observe.views.history import History, Totals, Waiting
from router.observe.views.news import News
from router.observe.views.past import shown_of
from router.observe.views.rounds import Rounds
from router.observe.views.shared_prefixes import SharedPrefixes
from router.observe.views.summary import Subject
from router.observe.views.tiles import standing_of

ROUND_S = 1.0
SAMPLES_PER_S = 2.0
"""Decisions and refusals sampled in a second, in the mean, while there are viewers."""
SHARE_STEP = 2.0
"""Factor by which the share of sampled decisions must differ before it is changed."""
TTFT = "ttft"

log = logging.getLogger("kvroute.console")


class Console:
    """The console's state and messages; its HTTP pages are in router/observe/console/pages.py."""

    def __init__(self, subject: Subject, clock: Callable[[], float]) -> None:
        self.about = subject.about
        self.viewers = Viewers()
        self.failures = 0
        self.sampled = 0
        """Number of sampled decisions."""
        self.prefixes = SharedPrefixes()
        self.decisions = Decisions(self._ttft)
        self.news = News()
        self._subject = subject
        self._clock = clock
        self.history = History(clock(), self._totals())
        self.rounds = Rounds(subject, self.history, self.decisions, self.prefixes, self.news)
        self._came = asyncio.Event()
        self._share = 0.0
        """Share of decisions that are sampled; 0: none are."""
        self._picks = 0, 0.0
        """Picks since the start at the last round, and the time of that round in seconds."""
        self._first_tokens = 0.0

    def join(self, cut: Callable[[], None]) -> Viewer | None:
        """Adds a viewer, which gets everything at once; None: there are too many."""
        viewer = self.viewers.join(cut)
        if viewer is not None:
            if self.rounds.is_fresh:
                viewer.has_all = True
                viewer.put(self.rounds.whole())
            self._came.set()
        return viewer

    async def run(self) -> None:
        """Makes rounds, until it is cancelled."""
        while True:
            try:
                await self.step()
            except Exception:
                self.failures += 1
                if self.failures == 1:
                    log.exception("a round of the console failed; the next ones are only counted")
            self._came.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._wait_for_first()

    def stop(self) -> None:
        """Ends all viewers, so that the port can close."""
        self.viewers.stop()
        self._sample(0.0)

    async def step(self) -> None:
        """Does what is due now: a round, a point of history."""
        now_s = self._clock()
        sources = self._subject.core.fleet.view.sources.values()
        self.news.look(
            {source.key: standing_of(source, self._subject.core) for source in sources}, now_s
        )
        if self.history.is_due(now_s):
            self._add_point(now_s)
        if not self.viewers:
            if self.rounds.is_fresh:
                self.rounds.forget()
            self._sample(0.0)
            return
        self._sample(self._wanted_share(now_s))
        round_ = self.rounds.write(now_s)
        while True:
            try:
                next(round_)
            except StopIteration as end:
                self.viewers.publish(end.value, self.rounds.whole)
                return
            await asyncio.sleep(0)  # other calls have a turn

    def watch(self, decision: Decision) -> None:
        """Keeps a sampled decision, before anything of it is reserved."""
        self.sampled += 1
        self.decisions.watch(decision)
        self.prefixes.watch(decision)

    def find(self, wanted: str) -> Generator[None, None, list[ShownDecision]]:
        """The picks of an id (Reservations.find), the newest first. A generator that yields between
        steps.
        """
        known = yield from self._subject.core.reservations.find(wanted)
        return [shown for reservation in known for shown in shown_of(reservation)]

    async def _wait_for_first(self) -> None:
        """Returns when a viewer has come and there is no fresh round to show."""
        while True:
            await self._came.wait()
            if not self.rounds.is_fresh:
                return
            self._came.clear()

    def _add_point(self, now_s: float) -> None:
        mean_s = self._subject.core.fleet.first_tokens.mean_s
        waiting = Waiting.of(sums(self._subject.admission.queue, now_s))
        self.history.add(
            now_s,
            self._totals(),
            waiting,
            mean_s if mean_s > 0 and mean_s != self._first_tokens else None,
        )
        self._first_tokens = mean_s  # unchanged: no first token came since

    def _totals(self) -> Totals:
        refused = sum(self._subject.refused().values())
        return Totals.of(self._subject.tally, self._subject.core.ttft_check, refused)

    def _wanted_share(self, now_s: float) -> float:
        """The share of decisions that gives SAMPLES_PER_S at the rate of picks since the last
        round; the present share, where it differs by less than the factor SHARE_STEP."""
        picks, (before, at_s) = int(self._subject.tally.picks[0]), self._picks
        self._picks = picks, now_s
        elapsed_s = now_s - at_s
        if not at_s or elapsed_s <= 0 or elapsed_s > 10 * ROUND_S:
            return self._share or 0.05
        pace = (picks - before) / elapsed_s
        wanted = min(1.0, SAMPLES_PER_S / pace) if pace > 0 else 1.0
        apart = max(wanted, self._share) / min(wanted, self._share) if self._share else SHARE_STEP
        return wanted if apart >= SHARE_STEP else self._share

    def _sample(self, share: float) -> None:
        """Sets the share of decisions that is sampled; 0: none."""
        if share == self._share:
            return
        self._share = share
        if share:
            watcher = Sampled(self.watch, share, self.decisions.watch_refused)
            self._subject.watchers.look(watcher)
        else:
            self._subject.watchers.look(None)

    def _ttft(self) -> Policy | None:
        """The policy with which sampled decisions are compared; None: the router has none."""
        return self._subject.core.policies.get(TTFT)
