"""nats-py's client, mended where a bad network or a busy server could keep it away for good.

What is overridden has no public name in nats-py; tests/events/test_broker.py shows, against a real
server, what each override is for.
"""

import asyncio

from nats.aio.client import Client, Srv
from nats.errors import Error, StaleConnectionError
from typing_extensions import override

PING_S = 0.7
PINGS_MAX = 2
"""A connection on which nothing came since this many pings is dead. Found out within 2.1 s, before
workers count as silent (beat_timeout_s); a server that is a second late is only busy."""
_LASTING_ERRORS = ("permissions violation",)
"""After these the server keeps the connection."""


class NatsClient(Client):
    """A connection that always comes back."""

    def abort(self) -> None:
        """Ends the TCP connection at once, unsent bytes included."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    @override
    async def _attempt_reconnect(self) -> None:
        # nats-py waits until all is written to a peer that may have stopped reading.
        self.abort()
        await super()._attempt_reconnect()

    @override
    async def _connect_to_server(self, s: Srv) -> None:
        self.abort()  # of an attempt before that got no answer, and would stay open
        await super()._connect_to_server(s)

    @override
    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes for good when a server that is there says no, as one that is reloaded with
        # other users may do for a moment.
        if any(lasting in err_msg for lasting in _LASTING_ERRORS):
            await super()._process_err(err_msg)
            return
        error = Error(f"nats: {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    @override
    async def _ping_interval(self) -> None:
        # nats-py takes only pongs for an answer, which may be far behind in what a server has to
        # send to a busy router.
        heard = self.stats["in_msgs"]
        while True:
            await asyncio.sleep(PING_S)
            if self.stats["in_msgs"] != heard:
                heard = self.stats["in_msgs"]
                self._pings_outstanding = 0
            if self._pings_outstanding >= PINGS_MAX:
                error = StaleConnectionError()
                await self._error_cb(error)
                await self._process_op_err(error)
                return
            self._pings_outstanding += 1
            await self._send_ping()
