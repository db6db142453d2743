"""Certificates, CAs, tokens and clients' certificates change under 200 requests a second."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from events.plane.clock import unix_now
from kvroute.client import KvRouteClient
from kvroute.v1 import Progress, ProgressState
from router.config.settings.keys_settings import DialSettings
from router.config.settings.serving_settings import GrpcSettings
from router.net.keys.certificates import Certificates
from router.net.keys.dialing import dial_options
from router.net.keys.door import Door
from router.net.keys.followed import FOLLOW_S, Followed
from tests.stage.certificates import Authority, written
from tests.stage.keys import hashed, identity, write_keys
from tests.stage.loopback import TurnedClock
from tests.stage.served import served
from tests.stage.waiting import until

RATE_PER_S = 200
REQUESTS = 1600
CALL_S = 60.0
OPEN_MAX = 50
"""Requests: fewer than lie between two changes, so that none is older than the last but one."""
AGE_S = 2.0
"""Of connections, so that they are made anew all the time."""


class Traffic:
    """Requests at a rate, each with its report."""

    def __init__(self, client: KvRouteClient) -> None:
        self.answered = 0
        self.failures: list[str] = []
        """And why, by request."""
        self._client = client
        self._open: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(OPEN_MAX)

    @property
    def ended(self) -> int:
        return self.answered + len(self.failures)

    async def run(self) -> float:
        """Returns the requests that were sent in a second."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for number in range(REQUESTS):
            await asyncio.sleep(began_s + number / RATE_PER_S - loop.time())
            await self._places.acquire()
            task = asyncio.create_task(self._request(number))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        rate = REQUESTS / (loop.time() - began_s)
        await asyncio.gather(*self._open)
        return rate

    async def _request(self, number: int) -> None:
        tokens = list(range(number, number + 64))
        try:
            pick = await self._client.route(token_ids=tokens, timeout_s=CALL_S)
            finished = Progress(
                reservation_id=pick.reservation_id, state=ProgressState.PROGRESS_STATE_FINISHED
            )
            await self._client.report(finished, timeout_s=CALL_S)
        except Exception as error:  # each is a failed call
            self.failures.append(f"{number}: {type(error).__name__}: {error}")
        else:
            self.answered += 1
        finally:
            self._places.release()


class Rotation:
    """The files of a router and of its client, and each change of them. The client's files are read
    again at once: its clock is put forward."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server, self._client = folder / "server", folder / "client"
        for part in (self._server, self._client):
            part.mkdir()
        self.servers = Authority("first servers"), Authority("second servers")
        self.callers = Authority("first callers"), Authority("second callers")
        self.clock = TurnedClock()
        self.followed = Followed()
        self.tls = written(self._server, self.servers[0].issue(), self.callers[0])
        self._write_keys("first")
        (self._client / "ca").write_bytes(b"".join(one.pem for one in self.servers))
        self._write_certificate(self.callers[0])
        (self._client / "token").write_text("first")

    def dial(self) -> dict[str, Any]:
        """Arguments of the client."""
        file = {name: str(self._client / name) for name in ("ca", "crt", "key", "token")}
        settings = DialSettings(
            ca_file=file["ca"],
            certificate_file=file["crt"],
            key_file=file["key"],
            token_file=file["token"],
        )
        return dial_options(settings, self.clock)

    @property
    def keys_file(self) -> str:
        return str(self._server / "keys.yaml")

    def steps(self) -> list[Callable[[], None]]:
        """In order; each leaves a working client and router."""
        return [
            self._new_server_certificate,
            self._both_callers_cas,
            self._new_client_certificate,
            self._one_callers_ca,
            lambda: self._write_keys("first", "second"),
            self._new_token,
            lambda: self._write_keys("second"),
        ]

    def _new_server_certificate(self) -> None:
        certificate, key = self.servers[1].issue()
        (self._server / "tls.crt").write_bytes(certificate)
        self.followed.look()  # half of a rotation
        (self._server / "tls.key").write_bytes(key)

    def _both_callers_cas(self) -> None:
        (self._server / "ca.crt").write_bytes(b"".join(one.pem for one in self.callers))

    def _one_callers_ca(self) -> None:
        (self._server / "ca.crt").write_bytes(self.callers[1].pem)

    def _new_client_certificate(self) -> None:
        self._write_certificate(self.callers[1])
        self.clock.ahead_s += FOLLOW_S

    def _new_token(self) -> None:
        (self._client / "token").write_text("second")
        self.clock.ahead_s += FOLLOW_S

    def _write_certificate(self, signer: Authority) -> None:
        certificate, key = signer.issue("client", hosts=())
        (self._client / "crt").write_bytes(certificate)
        (self._client / "key").write_bytes(key)

    def _write_keys(self, *tokens: str) -> None:
        hashes = [hashed(token) for token in tokens]
        write_keys(self._server, identity("client", rights=("route", "report"), tokens=hashes))


async def rotate(rotation: Rotation, traffic: Traffic) -> None:
    """One change after the other, spread over the run."""
    steps = rotation.steps()
    for number, step in enumerate(steps, 1):
        share = number * REQUESTS // (len(steps) + 1)
        await until(lambda share=share: traffic.ended >= share, "requests between two changes")
        step()
        rotation.followed.look()


async def test_a_rotation_of_everything_fails_no_call(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path)
    certificates = Certificates(rotation.tls)
    door = Door(rotation.keys_file, clock=unix_now)
    rotation.followed.add("certificates", certificates)
    door.follow(rotation.followed)
    settings = GrpcSettings(listen="127.0.0.1:0", max_connection_age_s=AGE_S)
    async with served(grpc_settings=settings, certificates=certificates, door=door) as stage:
        stage.fleet.add("w0", total_slots=100_000)
        target = f"127.0.0.1:{stage.server.port}"
        async with KvRouteClient(target, fallback=False, **rotation.dial()) as client:
            traffic = Traffic(client)
            rotating = asyncio.create_task(rotate(rotation, traffic))
            rate = await traffic.run()
            await rotating
        left = len(stage.fleet.core.reservations)
    print(f"{REQUESTS} requests and reports at {rate:.0f} a second")  # noqa: T201
    assert traffic.failures == []
    assert traffic.answered == REQUESTS
    assert left == 0
    ok = {
        name: count for (name, result), count in rotation.followed.counts.items() if result == "ok"
    }
    assert ok == {"certificates": 3, "keys": 2}
