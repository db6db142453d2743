import asyncio
import errno
from typing import Any

import pytest
import zmq
import zmq.asyncio

from events.engines.sockets import Subscription


async def test_a_subscription_that_finds_no_free_file_leaves_no_socket_and_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its monitor needs a second one; what stayed open would use up those of the next try."""
    made = zmq.asyncio.Context.socket
    opened: dict[int, Any] = {}

    def socket(self: zmq.asyncio.Context, kind: int, **options: Any) -> Any:
        if kind == zmq.PAIR:
            raise zmq.ZMQError(errno.EMFILE)
        events = made(self, kind, **options)
        opened[int(events.fileno())] = events
        return events

    monkeypatch.setattr(zmq.asyncio.Context, "socket", socket)
    with zmq.asyncio.Context() as context:
        with pytest.raises(zmq.ZMQError):
            Subscription(context, "tcp://127.0.0.1:1")
        ((descriptor, events),) = opened.items()
        assert events.closed
        assert not asyncio.get_running_loop().remove_reader(descriptor)
