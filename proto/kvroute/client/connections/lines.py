"""Lines: the connections of a client to its routers, and the choice of a line for each call.

Each address has a channel of its own. gRPC could balance one channel over all of them, but it would
send a report to any router, and only the router that made a reservation knows it.

Laws:
- a call goes to a connected router that has the fewest of our calls open, if any is connected, and
  to a silent router (silence.py) only if there is no other;
- a report goes to the router that made the reservation while it is connected, else to another
  router, which forwards it over NATS;
- lines in use never exceed LINES_MAX, lines kept for their reservations RETIRED_MAX.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import grpc
from typing_extensions import override

from kvroute.client.connections.channel import Address, Target, addresses_of
from kvroute.client.connections.line import ConnectionOptions, Line
from kvroute.client.errors import ClientClosed, unreachable

LINES_MAX = 16
"""Routers used at once; of more addresses, a random sample."""
RETIRED_MAX = 16
"""Lines to addresses that a name lost, kept while reservations may need them."""
OWNERS_MAX = 256
"""Names of routers remembered; a router has a new name after each restart."""
OWNER_NAME_MAX = 256
"""Characters of a name that is remembered; names of routers are much shorter."""
LEAVING_MAX = 32
"""Lines with replaced credentials, at most; past it the oldest is closed with its open calls."""
LEAVE_S = 60.0
"""Seconds for which open calls go on over a line with replaced credentials, at most."""
LEAVE_LOOK_S = 0.1
RESOLVE_S = 30.0
"""Seconds between lookups of names."""
RESOLVE_S_MIN = 1.0
"""Seconds between lookups of names while a router can't be reached."""
REST_S = 1.0
"""Seconds for which a router that failed a call is passed over, if there is another."""

log = logging.getLogger("kvroute.client")


class Lines:
    """All of a client's lines. Needs a running loop."""

    def __init__(
        self,
        targets: Sequence[Target],
        options: ConnectionOptions,
        counts: Counter[str],
        on_silent: Callable[[Line], None],
    ) -> None:
        """counts: `lookups` of names, failed lookups (`lookups_failed`), `lines` opened, and those
        of Line. on_silent: see Watch."""
        self._targets = targets
        credentials = options.credentials
        self._renewable = credentials if callable(credentials) else None
        self._credentials = credentials() if callable(credentials) else credentials
        self._options = options
        self._counts = counts
        self._clock = options.clock
        self._on_silent = on_silent
        self._lines: list[Line] = []
        self._retired: list[Line] = []
        self._leaving: dict[asyncio.Task[None], Line] = {}
        """Lines with replaced credentials, while calls are open on them, by the task that closes
        each."""
        self._owners: OrderedDict[str, Line] = OrderedDict()
        """Router's name -> line, the least recently used first."""
        self._turn = 0
        self._named = any(target.host is not None for target in targets)
        self._looked_up_s = 0.0
        self._lookup: asyncio.Task[None] | None = None
        self._closed = False

    @override
    def __repr__(self) -> str:
        calls = sum(line.calls for line in self._lines)
        return f"<Lines {len(self._lines)} in use, {len(self._retired)} retired, {calls} calls>"

    def take(self) -> Line | None:
        """The line for a call; None: the call has to wait()."""
        if self._renewable is not None and (new := self._renewable()) is not self._credentials:
            self._renew(new)
        lines = self._lines
        if self._named and lines and self._clock() - self._looked_up_s >= RESOLVE_S:
            _ = self._look_up()
        if len(lines) > 1:
            lines = self._connected()
        return self._least_busy(lines) if lines else None

    async def wait(self) -> Line:
        """The line for a call, after a wait for addresses, and until one of several routers is
        connected or all have failed to. Raises RouterUnreachable when no name has an address, and
        ClientClosed after close()."""
        if not self._lines:
            await asyncio.shield(self._look_up())
        if len(self._lines) > 1:
            await self._any_settled()
        if self._closed:
            raise ClientClosed
        return self._least_busy(self._connected() or self._lines)

    def all(self) -> list[Line]:
        """Lines in use, and lines that are kept for their reservations or open calls."""
        return [*self._lines, *self._retired, *self._leaving.values()]

    def owner(self, reservation_id: str) -> Line | None:
        """The line to the router that made a reservation; None: it is not known."""
        return self._owners.get(_name(reservation_id))

    def reserved(self, line: Line, reservation_id: str) -> None:
        """Records that the router of a line made a reservation: calls about it go to that line."""
        replica = _name(reservation_id)
        if len(replica) > OWNER_NAME_MAX:
            return
        if self._owners.get(replica) is not line:
            self._owners[replica] = line
        self._owners.move_to_end(replica)
        if len(self._owners) > OWNERS_MAX:
            self._owners.popitem(last=False)

    def failed(self, line: Line) -> bool:
        """Records that a router could not be reached: passes it over for REST_S seconds, and looks
        names up again.

        Returns whether another router is connected.
        """
        now_s = self._clock()
        line.rests_until_s = now_s + REST_S
        if self._named and now_s - self._looked_up_s >= RESOLVE_S_MIN:
            _ = self._look_up()
        return self.another(line)

    def another(self, line: Line) -> bool:
        """Whether another router is connected and not silent."""
        return len(self._lines) > 1 and any(
            other is not line and not other.watch.silent for other in self._connected()
        )

    async def close(self) -> None:
        """Ends all connections."""
        self._closed = True
        if self._lookup is not None:
            self._lookup.cancel()
            await asyncio.wait({self._lookup})
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        for line in (*self._lines, *self._retired):
            await line.close()

    def _renew(self, credentials: grpc.ChannelCredentials) -> None:
        """Takes other credentials: all later calls go over new connections; open ones go on."""
        self._credentials = credentials
        before, self._lines = self._lines, [self._open(line.address) for line in self._lines]
        new = dict(zip(before, self._lines, strict=True))
        for name, owner in self._owners.items():
            self._owners[name] = new.get(owner, owner)
        for line in before:
            task = asyncio.create_task(self._leave(line))
            self._leaving[task] = line
            task.add_done_callback(lambda task: self._leaving.pop(task, None))
        while len(self._leaving) > LEAVING_MAX:
            oldest = next(iter(self._leaving))
            del self._leaving[oldest]
            oldest.cancel()  # which closes its line

    async def _leave(self, line: Line) -> None:
        """Closes a line once its open calls are over, or after LEAVE_S."""
        ends_s = self._clock() + LEAVE_S
        try:
            while line.calls and self._clock() < ends_s:  # noqa: ASYNC110  # no event to await
                await asyncio.sleep(LEAVE_LOOK_S)
        finally:
            await line.close()

    def _least_busy(self, lines: list[Line]) -> Line:
        """A line with the fewest open calls; equal lines in turn."""
        if len(lines) == 1:
            return lines[0]
        fewest = min(line.calls for line in lines)
        least = [line for line in lines if line.calls == fewest]
        self._turn += 1
        return least[self._turn % len(least)]

    def _connected(self) -> list[Line]:
        """Lines that a call may take: connected, not silent unless all are, and not passed over
        unless all are."""
        connected = [line for line in self._lines if line.connected(connect=True)]
        connected = [line for line in connected if not line.watch.silent] or connected
        now_s = self._clock()
        return [line for line in connected if line.rests_until_s <= now_s] or connected

    async def _any_settled(self) -> None:
        """Waits until a line is connected, or all have failed to connect."""
        waits = [asyncio.ensure_future(line.settled()) for line in self._lines]
        try:
            for settled in asyncio.as_completed(waits):
                if await settled:
                    return
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    def _look_up(self) -> asyncio.Task[None]:
        """Looks all names up, in one task that all waiting calls share."""
        if self._lookup is None:
            self._lookup = asyncio.create_task(self._look_up_all())
            self._lookup.add_done_callback(self._looked_up)
        return self._lookup

    def _looked_up(self, lookup: asyncio.Task[None]) -> None:
        self._lookup = None
        if not lookup.cancelled() and (error := lookup.exception()) is not None and self._lines:
            log.warning("a lookup of routers failed, so known addresses stay in use: %s", error)

    async def _look_up_all(self) -> None:
        self._looked_up_s = self._clock()
        resolved: dict[str, Address] = {}
        failure: OSError | UnicodeError | None = None
        for target in self._targets:
            self._counts["lookups"] += target.host is not None
            try:
                for address in await addresses_of(target):
                    resolved.setdefault(address.target, address)
            except (OSError, UnicodeError) as error:  # UnicodeError: a label that DNS can't have
                self._counts["lookups_failed"] += 1
                failure = error
        if failure is not None and (self._lines or not resolved):
            # A name that has no address for a moment is no reason to leave its routers.
            names = ", ".join(target.text for target in self._targets)
            why = getattr(failure, "strerror", None) or failure
            raise unreachable(f"{names} can't be resolved: {why}") from failure
        await self._change(list(resolved.values()))

    async def _change(self, addresses: list[Address]) -> None:
        """Opens lines to new addresses; retires those whose address is gone."""
        lines = {line.address: line for line in (*self._retired, *self._lines)}
        in_use = {line.address for line in self._lines}
        kept = [address for address in addresses if address in in_use][:LINES_MAX]
        new = [address for address in addresses if address not in in_use]
        room = LINES_MAX - len(kept)
        chosen = [*kept, *(new if len(new) <= room else self._options.rng.sample(new, room))]
        self._lines = [lines.get(address) or self._open(address) for address in chosen]
        retired = [line for line in lines.values() if line not in self._lines]
        # A line without connection and without open calls has no reservation of this client.
        in_touch = [line for line in retired if line.calls or line.connected(connect=False)]
        self._retired = in_touch[-RETIRED_MAX:]
        for line in retired:
            if line not in self._retired:
                self._owners = OrderedDict(
                    (name, owner) for name, owner in self._owners.items() if owner is not line
                )
                await line.close()

    def _open(self, address: Address) -> Line:
        self._counts["lines"] += 1
        return Line(address, self._credentials, self._options, self._counts, self._on_silent)


def _name(reservation_id: str) -> str:
    """The name of the router that made a reservation: ids are `<router's name>-<number>`."""
    return reservation_id.rpartition("-")[0]
