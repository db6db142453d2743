"""The console's pages over real HTTP: sign-in, checks of Host and Origin, server-sent events."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.net.keys.certificates import Certificates
from router.observe.console.pages import BODY_MAX, LOOK_S
from router.observe.console.viewers import WAITING_MAX
from tests.stage.certificates import Authority, written
from tests.stage.console import Served, event, served
from tests.stage.fleet import Fleet, prompt
from tests.stage.keys import a_door, identity, write_keys
from tests.stage.waiting import until

OWN = "Origin"


async def sign_in(session: aiohttp.ClientSession, url: str, token: str) -> int:
    body = {"token": token}
    async with session.post("/console/session", json=body, headers={OWN: url}) as response:
        return response.status


def jar() -> aiohttp.CookieJar:
    return aiohttp.CookieJar(unsafe=True)  # of an IP address, too


@asynccontextmanager
async def visited(
    fleet: Fleet | None = None, **about: Any
) -> AsyncIterator[tuple[Served, aiohttp.ClientSession]]:
    """A console, and a browser that views it."""
    async with (
        served(fleet, **about) as stage,
        aiohttp.ClientSession(stage.url, cookie_jar=jar()) as session,
    ):
        yield stage, session


async def got(session: aiohttp.ClientSession, path: str, **about: Any) -> int:
    """Status of a GET."""
    async with session.get(path, **about) as response:
        return response.status


async def test_the_page_and_its_files_come_with_a_strict_policy_and_without_inline_script() -> None:
    async with visited() as (_, session):
        async with session.get("/console", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "/console/")
        async with session.get("/console/") as response:
            assert response.status == 200
            page = await response.text()
            policy = response.headers["Content-Security-Policy"]
            etag = response.headers["ETag"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "<style" not in page
        assert " style=" not in page
        assert "<script>" not in page
        async with session.get("/console/", headers={"If-None-Match": etag}) as response:
            assert response.status == 304
        for name in ("../pages.py", "nothing.js", "%2e%2e/pages.py"):
            assert await got(session, f"/console/{name}") == 404
        async with session.get("/metrics") as response:
            assert 'kvroute_known{what="console_pages"} 0.0' in await response.text()


async def test_without_keys_events_come_at_once_on_loopback() -> None:
    async with visited() as (stage, session):
        stage.fleet.add("a")
        async with session.get("/console/events") as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert response.headers["Cache-Control"] == "no-store"
            await stage.console.step()
            name, content = await event(response)
            assert name == "whole"
            assert [tile["worker_id"] for tile in content["workers"]] == ["a"]
            assert content["about"]["replica"] == "here-0123abcd"
            await stage.console.step()
            name, content = await event(response)
            assert (name, content["workers"]) == ("tick", [])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_other_hosts_and_origins_are_turned_away(
    headers: dict[str, str], status: int
) -> None:
    async with visited() as (stage, session):
        for path in ("", "session"):
            assert await got(session, f"/console/{path}", headers=headers) == status
        if status == 403:
            assert await got(session, "/console/events", headers=headers) == 403
            assert stage.pages.turned_away == 3


async def test_with_keys_a_token_becomes_a_cookie_and_only_that_opens_events(
    tmp_path: Path,
) -> None:
    door = a_door(
        tmp_path,
        identity("watcher", rights=("observe",)),
        identity("caller", rights=("route", "report")),
        identity("narrow", rights=("observe",), workers=["a*"]),
    )
    async with visited(door=door) as (stage, session):
        events = "/console/events"
        async with session.get(events) as response:
            assert response.status == 401
            assert (await response.json())["by"] == "token"
        assert await got(session, "/console/session") == 401
        assert await sign_in(session, stage.url, "wrong") == 401
        assert await sign_in(session, stage.url, "caller-token") == 403
        assert await sign_in(session, stage.url, "narrow-token") == 403
        assert not len(session.cookie_jar)
        async with session.post(
            "/console/session",
            json={"token": " watcher-token\n"},
            headers={OWN: stage.url},
        ) as response:
            assert (response.status, await response.json()) == (200, {"identity": "watcher"})
            cookie = response.headers["Set-Cookie"]
        for part in ("HttpOnly", "SameSite=Strict", "Path=/console", "Max-Age=43200"):
            assert part in cookie
        assert "Secure" not in cookie
        assert "watcher" not in cookie
        async with session.get(events) as response:
            assert response.status == 200
            await stage.console.step()
            assert (await event(response))[0] == "whole"
        async with session.delete("/console/session", headers={OWN: stage.url}) as response:
            assert response.status == 200
        assert await got(session, events) == 401
        assert stage.pages.sign_ins == {"ok": 1, "refused": 3, "malformed": 0}


async def test_a_sign_in_needs_our_own_page_and_a_small_json_body(tmp_path: Path) -> None:
    door = a_door(tmp_path, identity("watcher", rights=("observe",)))
    async with visited(door=door) as (stage, session):
        url = "/console/session"
        async with session.post(url, json={"token": "watcher-token"}) as response:
            assert response.status == 403  # no Origin
        for body in (b"", b"[]", b'{"token": 1}', b'{"token": " "}', b"x" * (BODY_MAX + 1)):
            headers = {OWN: stage.url, "Content-Type": "application/json"}
            async with session.post(url, data=body, headers=headers) as response:
                assert response.status == 400
        async with session.post(url, data=b"token=a", headers={OWN: stage.url}) as response:
            assert response.status == 400
        assert stage.pages.sign_ins["malformed"] == 6


async def test_a_key_that_is_taken_back_ends_its_pages(tmp_path: Path) -> None:
    door = a_door(tmp_path, identity("watcher", rights=("observe",)))
    async with visited(door=door) as (stage, session):
        assert await sign_in(session, stage.url, "watcher-token") == 200
        async with session.get("/console/events") as response:
            await stage.console.step()
            assert (await event(response))[0] == "whole"
            write_keys(tmp_path, identity("other", rights=("observe",)))
            assert door.reload()
            names = []
            for _ in range(LOOK_S):
                await stage.console.step()
                names.append((await event(response))[0])
                if names[-1] == "signed_out":
                    break
            assert names == ["tick"] * (LOOK_S - 1) + ["signed_out"]
        await until(lambda: not len(stage.console.viewers), "the page's end")
        assert stage.console.viewers.ended["signed_out"] == 1


async def test_a_session_ends_with_its_time(tmp_path: Path) -> None:
    fleet = Fleet()
    door = a_door(tmp_path, identity("watcher", rights=("observe",)), clock=fleet.clock)
    async with visited(fleet, door=door, session_s=60.0) as (stage, session):
        assert await sign_in(session, stage.url, "watcher-token") == 200
        fleet.now_s += 59.0
        assert await got(session, "/console/session") == 200
        fleet.now_s += 1.0
        assert await got(session, "/console/session") == 401


async def test_over_tls_the_cookie_is_secure_and_a_certificate_may_sign_in(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates.of(written(tmp_path, authority.issue(), authority))
    assert certificates is not None
    own = tmp_path / "own"
    own.mkdir()
    client = written(own, authority.issue("client", hosts=()))
    door = a_door(
        tmp_path,
        identity("watcher", rights=("observe",)),
        identity("certified", rights=("observe",), tokens=[], certificates=["cn:client"]),
    )
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    trusting.check_hostname = False
    async with served(door=door, tls=certificates.contexts(ssl.CERT_OPTIONAL)) as stage:
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with (
            aiohttp.ClientSession(stage.url, connector=connector, cookie_jar=jar()) as session,
            session.post(
                "/console/session",
                json={"token": "watcher-token"},
                headers={OWN: stage.url},
            ) as response,
        ):
            assert response.status == 200
            assert "Secure" in response.headers["Set-Cookie"]
        certified = ssl.create_default_context(cadata=authority.pem.decode())
        certified.check_hostname = False
        certified.load_cert_chain(client.certificate_file or "", client.key_file)
        connector = aiohttp.TCPConnector(ssl=certified)
        async with (
            aiohttp.ClientSession(stage.url, connector=connector) as session,
            session.get("/console/session") as response,
        ):
            assert response.status == 200
            assert (await response.json())["identity"] == "certified"


async def test_pages_past_the_bound_are_refused() -> None:
    async with visited() as (stage, session):
        stage.console.viewers.most = 1
        async with session.get("/console/events") as first:
            assert first.status == 200
            async with session.get("/console/events") as second:
                assert second.status == 503
                assert second.headers["Retry-After"]
        assert stage.console.viewers.refused == 1


async def test_a_browser_that_reads_nothing_is_cut_and_one_that_vanishes_leaves() -> None:
    fleet = Fleet()
    for i in range(200):
        fleet.add(f"w{i}", address=f"http://{'x' * 200}:{i}")
    async with visited(fleet) as (stage, session):
        host, port = stage.url.removeprefix("http://").split(":")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, (host, int(port)))
        await loop.sock_sendall(deaf, b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(stage.console.viewers) == 1, "the deaf viewer")
        async with session.get("/console/events") as response:
            assert response.status == 200
            await until(lambda: len(stage.console.viewers) == 2, "the second viewer")
            for turn in range(200):
                for key in list(fleet.relays):
                    fleet.say(key, running=turn)  # all tiles change: ticks are large
                await stage.console.step()
                await event(response)
                await asyncio.sleep(0)
                if stage.console.viewers.ended["slow"]:
                    break
            assert stage.console.viewers.ended["slow"] == 1
            assert len(stage.console.viewers) == 1
        deaf.close()
        for _ in range(WAITING_MAX + 2):  # its end shows at a write
            await stage.console.step()
            await asyncio.sleep(0.01)
        await until(lambda: not len(stage.console.viewers), "an end of the other page")
        assert stage.console.viewers.ended["left"] == 1


async def test_a_stop_does_not_wait_for_open_pages() -> None:
    async with aiohttp.ClientSession() as session:
        async with served() as stage:
            response = await session.get(f"{stage.url}/console/events")
            await until(lambda: len(stage.console.viewers) == 1, "the page")
        assert stage.console.viewers.ended["stopped"] == 1
        response.close()


async def test_a_decision_is_found_by_its_request_with_the_rows_of_its_receipt() -> None:
    async with visited() as (stage, session):
        stage.fleet.add("a")
        stage.fleet.add("b")
        pick = stage.fleet.answer(prompt(32), request_id="mine~1")
        url = "/console/decisions"
        async with session.get(url, params={"id": "mine"}) as response:
            assert response.status == 200
            (found,) = (await response.json())["decisions"]
        assert found["request_id"] == "mine~1"
        assert found["reservation_id"] == pick.reservation_id
        assert found["state"] == "open"
        rows = pick.receipt.picked, pick.receipt.runner_up
        assert [row["cost"] for row in found["rows"]] == [row.cost for row in rows]
        async with session.get(url, params={"id": "another"}) as response:
            assert (await response.json()) == {"decisions": []}
        for wanted in ("", "x" * 1025):
            assert await got(session, url, params={"id": wanted}) == 400


async def test_without_a_key_no_decision_is_found_where_callers_need_one(tmp_path: Path) -> None:
    async with visited(door=a_door(tmp_path, identity("ops"))) as (_, session):
        assert await got(session, "/console/decisions?id=a") == 401
