"""Requests whose answers their callers do not see: their steps are inferred from the worker.

    unobserved ──the worker's events hold the prompt's last block──> prefill done
               ──its engine has fewer requests than are reserved──> finished

A picker to which Envoy shows no answers is such a caller. At the latest, its own guess of the end
(`picker.unobserved_s`) or the lease ends a request.

Laws:
- a reservation is here only while it is open, and after its caller said that it sees no answer;
- a prediction is no sign of a prompt that is computed: only the worker's events are;
- an engine whose load is not known ends no request;
- a sample shows how many reserved requests an engine no longer has, and not which: those whose
  prompts were computed first are taken for ended. So the worker's number of requests is right.
"""

from itertools import islice

import numpy as np

from indexer.identity import WorkerKey
from router.decide.core.reservation_life import ReservationLife
from router.fleet.reservations.reservations import Ending, Reservation

LOOKS = 1024
"""Prompts that one tick looks for in the index: about 3 ms. Later ticks look for the others."""


class Unobserved:
    """Open reservations of a replica whose callers do not see the answers."""

    def __init__(self, life: ReservationLife) -> None:
        self._life = life
        self._open: dict[WorkerKey, dict[str, Reservation]] = {}
        """Reservations of each worker by id, in the order in which their callers left them."""
        self._prefilling: dict[str, Reservation] = {}
        """Open reservations, by id, whose prompts are not known to be computed; the next to look at
        in front."""
        self.prefills = 0
        """Prompts that the worker's events showed to be computed."""
        self.ends = 0
        """Requests that an engine's load showed to be over."""

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, reservation: Reservation) -> None:
        """Adds a reservation whose caller sees nothing of the answer."""
        here = self._open.setdefault(reservation.worker, {})
        if reservation.id not in here:
            here[reservation.id] = reservation
            if not reservation.prefill_done:
                self._prefilling[reservation.id] = reservation

    def look(self, now_s: float) -> None:
        """Infers which prompts are computed from the blocks that workers hold now."""
        for reservation_id in list(islice(self._prefilling, LOOKS)):
            reservation = self._prefilling.pop(reservation_id)
            if reservation.prefill_done:
                continue
            if self._holds_prompt(reservation):
                self.prefills += self._life.prefill_done(reservation, now_s)
            else:
                self._prefilling[reservation_id] = reservation
        for worker in list(self._open):
            self._forget(worker)

    def on_sample(self, worker: WorkerKey, missing: int, now_s: float) -> None:
        """Ends requests that an engine's load report no longer counts. missing: number of requests
        that are reserved there, and not in the report.
        """
        here = self._open.get(worker)
        if here is None or missing <= 0:
            return
        self._forget(worker)
        # The order of age remains among those whose prompts are computed, and among the others.
        by_step = sorted(here.values(), key=lambda reservation: not reservation.prefill_done)
        for reservation in by_step[:missing]:
            self._life.end(reservation, Ending.FINISHED, now_s)
            self.ends += 1
        self._forget(worker)

    def _forget(self, worker: WorkerKey) -> None:
        """Drops reservations of a worker that have ended."""
        here = self._open.get(worker, {})
        for reservation in list(here.values()):
            if reservation.ended is not None:
                del here[reservation.id]
        if not here and worker in self._open:
            del self._open[worker]

    def _holds_prompt(self, reservation: Reservation) -> bool:
        view, hold = self._life.fleet.view, reservation.prefill
        source = view.sources.get(reservation.worker if hold is None else hold.worker)
        last = reservation.prefixes[-1:]
        if source is None or not len(last):
            return False
        rows = view.index.overlap(last, 1, np.array([source.slot], np.intp))
        return bool(rows[0, 0]) and not rows[-1, 0]
