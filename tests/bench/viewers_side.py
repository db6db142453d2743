"""Pages that watch a console, in a process of their own: viewers_side.py PORT VIEWERS DEAF FICKLE

viewers read all that comes; deaf ones read nothing; fickle ones come each second and vanish.
"""

import asyncio
import socket
import sys

REQUEST = b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def viewer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    while await reader.read(1 << 20):
        pass


async def deaf(port: int) -> None:
    """Comes again once it is cut."""
    while True:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, ("127.0.0.1", port))
        await loop.sock_sendall(one, REQUEST)
        await asyncio.sleep(60.0)
        one.close()


async def fickle(port: int) -> None:
    while True:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await asyncio.sleep(1.0)
        writer.transport.abort()


async def main(port: int, *counts: int) -> None:
    kinds = (viewer, deaf, fickle)
    works = [kind(port) for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    await asyncio.gather(*works)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
