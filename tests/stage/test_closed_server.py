"""Connections of asyncio's servers end with the server, or with the loop, and leave nothing."""

import asyncio
import gc
import socket
import ssl
import warnings
from pathlib import Path

import pytest

from tests.stage.certificates import Authority


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_of_the_last_turn_is_closed(turns: int) -> None:
    left_open()  # by other tests
    transports: list[asyncio.BaseTransport] = []

    class Keeps(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)

    server = await asyncio.get_running_loop().create_server(Keeps, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    for _ in range(turns):
        await asyncio.sleep(0)
    server.close()
    for _ in range(10):
        await asyncio.sleep(0)
    for transport in transports:
        transport.close()
    client.close()
    await asyncio.sleep(0)
    transports.clear()
    assert left_open() == []


@pytest.mark.parametrize("by_listener", [False, True])
def test_a_tls_connection_whose_peer_never_says_goodbye_ends_with_the_loop(
    tmp_path: Path, by_listener: bool
) -> None:
    left_open()  # by other tests
    certificate, key = Authority().issue()
    (tmp_path / "server.pem").write_bytes(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    silent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    silent.check_hostname, silent.verify_mode = False, ssl.CERT_NONE

    async def closes() -> ssl.SSLSocket:
        accepted = asyncio.get_running_loop().create_future()

        class Tells(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.set_result(transport)

        loop, listening = asyncio.get_running_loop(), socket.create_server(("127.0.0.1", 0))
        plain = socket.create_connection(listening.getsockname())
        shaken = asyncio.create_task(asyncio.to_thread(silent.wrap_socket, plain))
        if by_listener:  # as router.net.listener does
            with listening:
                peer, _ = listening.accept()
            peer.setblocking(False)
            await loop.connect_accepted_socket(Tells, peer, ssl=context)
        else:
            server = await loop.create_server(Tells, sock=listening, ssl=context)
        (await accepted).close()
        if not by_listener:
            server.close()
        return await shaken

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        client = runner.run(closes())
    assert left_open() == []
    client.close()


def left_open() -> list[str]:
    """What the garbage collector says of sockets that nobody closed."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    texts = [str(one.message) for one in seen]
    return [text for text in texts if "socket" in text.lower()]
