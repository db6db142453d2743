"""The private names of nats-py that NatsClient stands on: each is there, and used as it was.

A release of nats-py that changes one fails here, before a reconnect does. pyproject.toml bounds
nats-py by the release that this was last run on.
"""

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from events.plane import nats_client
from events.plane.nats_client import NatsClient
from tests.stage.tcp import tcp_server

SOURCE = Path(nats_client.__file__)
OVERRIDDEN = {
    "_attempt_reconnect": ["self"],
    "_connect_to_server": ["self", "s"],
    "_ping_interval": ["self"],
    "_process_err": ["self", "err_msg"],
    "_process_info": ["self", "info", "initial_connection"],
    "_read_creds_user_jwt": ["self", "creds"],
    "_read_loop": ["self"],
}
"""Methods that nats-py calls and NatsClient replaces or goes around, with their parameters."""
CALLED = {
    "_process_msg": ["self", "sid", "subject", "reply", "data", "headers"],
    "_process_op_err": ["self", "e"],
    "_process_ping": ["self"],
    "_process_pong": ["self"],
    "_send_ping": ["self", "future"],
}
"""Methods of nats-py that NatsClient calls."""
ATTRIBUTES: dict[str, object] = {
    "_current_server": None,
    "_pings_outstanding": 0,
    "_pongs": [],
    "_sid": 0,
    "_status": Client.DISCONNECTED,
    "_transport": None,
}
"""What NatsClient reads or sets, and the value in a client that never connected."""
OTHERS = {"_error_cb", "_io_writer", "_over_ssl"}
"""Names with a test of their own below; `_over_ssl`, which is asyncio's, in test_nats_tls.py."""


def parameters(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)


def test_every_private_name_of_nats_py_is_listed_here() -> None:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(SOURCE.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    used |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    ours = {"_needs_tls", "_raw", "_take", "_process_line"}
    private = {
        name for name in used if name.startswith("_") and name.isidentifier() and name[1] != "_"
    }
    assert private - ours == {*OVERRIDDEN, *CALLED, *ATTRIBUTES} | OTHERS


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_is_called_by_nats_py_with_the_same_parameters(name: str) -> None:
    theirs, ours = getattr(Client, name), getattr(NatsClient, name)
    assert ours is not theirs
    assert parameters(theirs) == parameters(ours) == OVERRIDDEN[name]
    assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(ours)
    assert f"self.{name}(" in inspect.getsource(Client)


@pytest.mark.parametrize("name", CALLED)
def test_a_method_that_is_called_has_the_same_parameters(name: str) -> None:
    method = getattr(Client, name)
    assert parameters(method) == CALLED[name]
    assert inspect.iscoroutinefunction(method)


def test_a_client_has_the_attributes_that_are_read_and_set() -> None:
    client = Client()
    held = vars(client)
    assert {name: held[name] for name in ATTRIBUTES} == ATTRIBUTES
    assert parameters(held["_error_cb"]) == ["ex"]
    assert inspect.iscoroutinefunction(held["_error_cb"])
    assert client.stats["in_msgs"] == 0
    assert not client.is_closed
    assert not client.is_reconnecting


def test_a_transport_that_is_set_is_kept_and_holds_its_writer() -> None:
    assert vars(TcpTransport())["_io_writer"] is None
    for name in ("write", "writelines"):
        assert parameters(getattr(TcpTransport, name)) == ["self", "payload"]
        assert not inspect.iscoroutinefunction(getattr(TcpTransport, name))
    assert parameters(TcpTransport.wait_closed) == ["self"]
    assert inspect.iscoroutinefunction(TcpTransport.wait_closed)
    assert "if not self._transport:" in inspect.getsource(Client._connect_to_server)


@asynccontextmanager
async def connected() -> AsyncIterator[TcpTransport]:
    """A transport of NatsClient, to a server that says nothing."""

    async def hear(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with tcp_server(hear) as port:
        transport = nats_client._Tcp()
        await transport.connect(urlparse(f"nats://127.0.0.1:{port}"), 32 * 1024, 60)
        try:
            yield transport
        finally:
            transport.close()


async def test_a_cancelled_wait_for_a_connection_s_end_is_nothing_to_the_next_one() -> None:
    async with connected() as transport:
        first = asyncio.create_task(transport.wait_closed())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        transport.close()
        await transport.wait_closed()
        assert asyncio.current_task().cancelling() == 0


async def test_a_wait_for_a_connection_s_end_can_be_cancelled() -> None:
    async with connected() as transport:
        for cancelled_before in (False, True):  # and with it the future that both wait on
            wait = asyncio.create_task(transport.wait_closed())
            if not cancelled_before:
                await asyncio.sleep(0)
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
