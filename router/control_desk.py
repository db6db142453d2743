"""Fleet commands: each is applied once, in every replica, and the newest of a worker wins.

    operator ──gRPC──> one replica's desk ──control──> every replica's desk
    a replica that starts ──hello──> the others' desks ──control──> its desk

Law: whatever the order in which commands arrive, and however often, all replicas end alike.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from math import inf

import msgspec

from events.facts import Control
from router.core import DRAINED_MAX, RouterCore

_IDS_MAX = 1024
_LASTING = ("drain", "undrain", "remove")

log = logging.getLogger("kvroute")


class ControlDesk:
    """Applies fleet commands; our own come back to us over NATS."""

    def __init__(self, core: RouterCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._ids: deque[str] = deque(maxlen=_IDS_MAX)
        self._newest: OrderedDict[str, Control] = OrderedDict()
        """Of each worker, the newest command that lasts; the oldest in front."""
        self.on_resync: Callable[[str], None] = lambda _worker_id: None

    def apply(self, control: Control) -> int:
        """Returns the ranks reached; 0 for a command that was applied before, is older than another
        of its worker, or isn't known."""
        if control.id in self._ids:
            return 0
        self._ids.append(control.id)
        if not control.at_s:  # of an older release, which doesn't say when
            control = msgspec.structs.replace(control, at_s=self._clock())
        if control.action in _LASTING:
            newest = self._newest.get(control.worker_id)
            if newest is not None and (newest.at_s, newest.id) >= (control.at_s, control.id):
                return 0
        log.info("%s worker %s (command %s)", control.action, control.worker_id, control.id)
        match control.action:
            case "drain":
                self._keep(control)
                return self._core.drain(control.worker_id)
            case "undrain":
                self._keep(control)
                return self._core.undrain(control.worker_id)
            case "remove" if 0 <= control.tombstone_s < inf:
                return self._remove(control)
            case "resync":
                self.on_resync(control.worker_id)
                return len(self._core.view.ranks(control.worker_id))
            case "remove":
                self._core.view.dropped["malformed"] += 1
                return 0
            case _:
                self._core.view.dropped["unknown_kind"] += 1
                return 0

    def in_force(self) -> list[Control]:
        """What a replica that has just started must be told: as it was told us, oldest first."""
        now_s = self._clock()
        return [
            control
            for control in self._newest.values()
            if control.action != "remove" or now_s < control.at_s + self._tombstone_s(control)
        ]

    def _remove(self, control: Control) -> int:
        """A tombstone lasts from when the command was given, whenever it comes."""
        now_s = self._clock()
        left_s = min(control.at_s, now_s) + self._tombstone_s(control) - now_s
        self._keep(control)
        if left_s <= 0:
            return 0
        return self._core.remove(control.worker_id, left_s, now_s)

    def _tombstone_s(self, control: Control) -> float:
        return control.tombstone_s or self._core.tombstone_s

    def _keep(self, control: Control) -> None:
        self._newest[control.worker_id] = control
        self._newest.move_to_end(control.worker_id)
        while len(self._newest) > DRAINED_MAX:
            self._newest.popitem(last=False)
