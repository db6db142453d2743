"""Fleet commands: each is applied once in every replica; a worker's newest command wins.

    operator ──gRPC──> one replica ──control──> every replica
    a replica that starts ──hello──> the others ──control──> the replica that starts

A worker has two registers, each with the newest command that wrote to it: whether it is drained
(drain, undrain), and whether it is removed (remove; undrain takes that back).

Laws:
- whatever the order in which commands arrive, and however often, all replicas end alike;
- a command given here is newer than all that are known here of its worker, whatever the clocks of
  the replicas where those were given: clocks that differ make no command void.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from math import inf, nextafter
from typing import NamedTuple

import msgspec

from events.plane.facts import VERSION, Control
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S, TOMBSTONE_S
from router.decide.core.core import DRAINED_MAX, RouterCore

AHEAD_MAX_S = 86_400.0
"""Seconds. A command whose time is further ahead of our clock counts as given when it came, so that
later commands can have a newer time; else all replicas use the time in the command."""
_STEP_S = 1e-6
_IDS_MAX = 1024
_REGISTERS = {"drain": ("drain",), "undrain": ("drain", "remove"), "remove": ("remove",)}
"""Action of a command -> registers that it writes to. A resync writes to none."""

log = logging.getLogger("kvroute")
audit = logging.getLogger("kvroute.audit")


class _Held(NamedTuple):
    """The newest command of a register."""

    control: Control
    ends_s: float
    """When the command ends, by this router's clock; inf for all but removals."""

    @property
    def order(self) -> tuple[float, str]:
        return self.control.at_s, self.control.id


class FleetCommands:
    """Applies fleet commands; this replica's own commands come back to it over NATS."""

    def __init__(
        self,
        core: RouterCore,
        clock: Callable[[], float],
        *,
        on_resync: Callable[[str], None] = lambda _worker_id: None,
        on_removed: Callable[[str, float], None] = lambda _worker_id, _at_s: None,
    ) -> None:
        """on_resync: called with the id of a worker to read again. on_removed: called with the id
        of a removed worker and the time of the command."""
        self._core = core
        self._clock = clock
        self._given = 0
        self._ids: deque[str] = deque(maxlen=_IDS_MAX)
        self._registers: dict[str, OrderedDict[str, _Held]] = {
            "drain": OrderedDict(),
            "remove": OrderedDict(),
        }
        """Register -> worker id -> its newest command, the one written longest ago in front."""
        self.changes = 0
        """Number of times that the commands in force may have changed."""
        self.counts: Counter[str] = Counter()
        """Commands by action, and those that were `overtaken` or came from `far_ahead`."""
        self._on_resync = on_resync
        self._on_removed = on_removed
        self._listeners: list[Callable[[], object]] = []

    def on_change(self, call: Callable[[], object]) -> None:
        """Has `call` called whenever the commands in force may have changed."""
        self._listeners.append(call)

    def give(self, action: str, worker_id: str, tombstone_s: float = 0.0, by: str = "") -> Control:
        """Makes a command of this replica, newer than all commands that it knows of the worker.

        tombstone_s: seconds of a removal; 0: TOMBSTONE_S. by: the identity of its author.
        """
        self._given += 1
        name = f"{self._core.replica}-{self._given}"
        return Control(VERSION, name, action, worker_id, tombstone_s, self._next_s(worker_id), by)

    def apply(self, control: Control) -> int:
        """Applies a command. Returns the number of ranks reached; 0 for a command that was applied
        before, is older than another of its worker, or is of an unknown kind.
        """
        if control.id in self._ids:
            return 0
        self._ids.append(control.id)
        action = control.action
        if action == "remove" and not 0 <= control.tombstone_s < inf:
            self._core.fleet.view.dropped["malformed"] += 1
            return 0
        if action not in _REGISTERS and action != "resync":
            self._core.fleet.view.dropped["unknown_kind"] += 1
            return 0
        before = self.state(control.worker_id)
        control = self._timed(control)
        written = self._write(control)
        if not written and action != "resync":
            self.counts["overtaken"] += 1
            return 0
        self.counts[action] += 1
        ranks = self._perform(control, written)
        audited(action, control.worker_id, control.by, before, self.state(control.worker_id))
        log.info("%s worker %s (command %s)", action, control.worker_id, control.id)
        return ranks

    def knows(self, control: Control) -> bool:
        """Whether a command with this id was applied lately."""
        return control.id in self._ids

    def state(self, worker_id: str) -> str:
        """The commands in force for a worker and its ranks, as text for the audit log."""
        fleet = self._core.fleet
        name = "drained" if worker_id in fleet.drained else "in service"
        if self.removed(worker_id):
            name = "removed"
        return f"{name}, {len(fleet.view.ranks(worker_id))} ranks"

    def overtaken(self, control: Control) -> bool:
        """Whether a newer command has replaced one that was applied here, in full or in part."""
        return any(
            (held := self._registers[name].get(control.worker_id)) is None
            or held.control.id != control.id
            for name in _REGISTERS.get(control.action, ())
        )

    def removed(self, worker_id: str) -> bool:
        """Whether an operator's removal of a worker is in force."""
        held = self._registers["remove"].get(worker_id)
        return held is not None and held.control.action == "remove" and self._clock() < held.ends_s

    def drained(self, worker_id: str) -> bool:
        """Whether an operator's drain of a worker is in force."""
        held = self._registers["drain"].get(worker_id)
        return held is not None and held.control.action == "drain"

    def in_force(self) -> list[Control]:
        """The commands in force, for a replica that has just started, the oldest first.

        A removal's tombstone_s is such that it ends for its receivers when it ends here.
        """
        now_s = self._clock()
        in_force: dict[str, Control] = {}
        for register in self._registers.values():
            for control, ends_s in register.values():
                if ends_s <= now_s:
                    continue
                if control.action == "remove":
                    tombstone_s = ends_s - min(control.at_s, now_s)
                    control = msgspec.structs.replace(control, tombstone_s=tombstone_s)
                in_force[control.id] = control
        return sorted(in_force.values(), key=lambda control: (control.at_s, control.id))

    def _next_s(self, worker_id: str) -> float:
        """Now, or a time that is newer than all commands known here of a worker."""
        at_s = self._clock()
        for register in self._registers.values():
            if (held := register.get(worker_id)) is not None:
                at_s = max(at_s, _after(held.control.at_s))
        return at_s

    def _timed(self, control: Control) -> Control:
        """A command with a time to order it by: its own, or, if it has none or one too far ahead of
        our clock, a time newer than all known commands of its worker."""
        ahead_s = control.at_s - self._clock()
        if ahead_s > AHEAD_MAX_S:
            self.counts["far_ahead"] += 1
            log.warning(
                "command %s (%s worker %s) is dated %.0f s ahead of this router's clock and counts"
                " as given now; set the clock of the replica that gave it",
                control.id,
                control.action,
                control.worker_id,
                ahead_s,
            )
        elif control.at_s:
            return control
        at_s = self._next_s(control.worker_id)  # old releases don't say when
        return msgspec.structs.replace(control, at_s=at_s)

    def _write(self, control: Control) -> list[str]:
        """Puts a command into the registers where it is the newest; returns their names."""
        ends_s = inf
        if control.action == "remove":
            tombstone_s = min(control.tombstone_s or TOMBSTONE_S, TOMBSTONE_MAX_S)
            ends_s = min(control.at_s, self._clock()) + tombstone_s
        written = []
        for name in _REGISTERS.get(control.action, ()):
            register, new = self._registers[name], _Held(control, ends_s)
            held = register.get(control.worker_id)
            if held is not None and held.order >= new.order:
                continue
            register[control.worker_id] = new
            register.move_to_end(control.worker_id)
            if len(register) > DRAINED_MAX:
                register.popitem(last=False)
            written.append(name)
        if written:
            self.changes += 1
            for call in self._listeners:
                call()
        return written

    def _perform(self, control: Control, written: list[str]) -> int:
        """Applies a command here; returns the ranks that it reached."""
        core, worker_id = self._core, control.worker_id
        match control.action:
            case "drain":
                return core.drain(worker_id)
            case "undrain":
                if "remove" in written:
                    core.fleet.view.pardon(worker_id)
                if "drain" in written:
                    core.undrain(worker_id)
                return len(core.fleet.view.ranks(worker_id))
            case "remove":
                now_s = self._clock()
                self._on_removed(worker_id, min(control.at_s, now_s))
                left_s = self._registers["remove"][worker_id].ends_s - now_s
                return core.remove(worker_id, left_s, now_s) if left_s > 0 else 0
            case _:
                self._on_resync(worker_id)
                return len(core.fleet.view.ranks(worker_id))


def audited(action: str, worker_id: str, by: str, before: str, after: str) -> None:
    """Writes a fleet command's line to the audit log."""
    audit.info("%s worker %r by %r: %s -> %s", action, worker_id, by or "unknown", before, after)


def _after(at_s: float) -> float:
    """A time just after at_s: by `_STEP_S`, or by more where floats are coarser than that."""
    return max(at_s + _STEP_S, nextafter(at_s, inf))
