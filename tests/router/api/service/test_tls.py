"""gRPC over TLS: which callers get in, and certificates that change under traffic."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvroute.client import KvRouteClient
from kvroute.v1 import fleet_pb2, fleet_pb2_grpc
from router.config.settings.serving_settings import GrpcSettings
from router.net.keys.certificates import Certificates
from tests.router.api.service.setting import one_worker
from tests.stage.certificates import Authority, written
from tests.stage.served import Served, refusal, served

CALL_S = 60.0
"""A refused handshake is tried again until the call's deadline, so those calls have a short one."""
REFUSED_S = 1.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@asynccontextmanager
async def tls_stage(
    folder: Path, pair: tuple[bytes, bytes], client_ca: Authority | None = None
) -> AsyncIterator[tuple[Served, Certificates]]:
    certificates = Certificates(written(folder, pair, client_ca))
    async with served(certificates=certificates) as stage:
        one_worker(stage.fleet)
        yield stage, certificates


async def call(
    stage: Served,
    ca: Authority,
    pair: tuple[bytes, bytes] | None = None,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = CALL_S,
) -> int:
    """The workers that a caller is shown, on a connection of its own."""
    certificate, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(ca.pem, key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", host)]
    target = f"127.0.0.1:{stage.server.port}"
    async with grpc.aio.secure_channel(target, credentials, options) as channel:
        stub = fleet_pb2_grpc.FleetStub(channel)
        answer = await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=timeout_s)
        return len(answer.workers)


async def test_a_caller_that_trusts_the_authority_gets_in(
    tmp_path: Path, authority: Authority
) -> None:
    async with tls_stage(tmp_path, authority.issue()) as (stage, _):
        assert await call(stage, authority) == 1


async def test_a_server_that_a_caller_can_not_trust_gets_no_call(
    tmp_path: Path, authority: Authority
) -> None:
    async with tls_stage(tmp_path, authority.issue()) as (stage, _):
        for ca, host in ((Authority("other"), "127.0.0.1"), (authority, "router.example")):
            assert (
                await refusal(call(stage, ca, host=host, timeout_s=REFUSED_S))
            ).code is not grpc.StatusCode.OK
    async with tls_stage(tmp_path, authority.issue(expired=True)) as (stage, _):
        await refusal(call(stage, authority, timeout_s=REFUSED_S))


async def test_plain_text_reaches_nothing_behind_tls(tmp_path: Path, authority: Authority) -> None:
    async with tls_stage(tmp_path, authority.issue()) as (stage, _):
        await refusal(stage.call("ListWorkers", timeout=REFUSED_S))


async def test_with_a_ca_of_callers_only_its_valid_certificates_get_in(
    tmp_path: Path, authority: Authority
) -> None:
    callers, strangers = Authority("callers"), Authority("strangers")
    async with tls_stage(tmp_path, authority.issue(), callers) as (stage, _):
        assert await call(stage, authority, callers.issue("client", hosts=())) == 1
        for pair in (None, strangers.issue("client"), callers.issue("client", expired=True)):
            await refusal(call(stage, authority, pair, timeout_s=REFUSED_S))


async def test_a_rotation_under_load_fails_no_call(tmp_path: Path, authority: Authority) -> None:
    """Connections are made anew and reused while certificate and CA change."""
    old, new, both = Authority("old"), Authority("new"), Authority("both")
    both.pem = old.pem + new.pem
    async with tls_stage(tmp_path, old.issue()) as (stage, certificates):
        done = asyncio.Event()

        async def call_on() -> int:
            count = 0
            while not done.is_set():
                assert await call(stage, both) == 1
                count += 1
            return count

        credentials = grpc.ssl_channel_credentials(both.pem)
        target = f"127.0.0.1:{stage.server.port}"
        async with KvRouteClient(target, credentials=credentials, fallback=False) as client:

            async def route_on() -> int:
                count = 0
                while not done.is_set():
                    async with client.request(token_ids=[1, 2, 3], timeout_s=CALL_S):
                        count += 1
                return count

            tasks = [asyncio.create_task(work()) for work in (call_on, call_on, route_on)]
            for signer in (new, old, new):
                for _ in range(5):
                    assert await call(stage, both) == 1
                written(tmp_path, signer.issue())
                assert certificates.reload()
                assert await call(stage, signer) == 1  # by the new certificate
            done.set()
            counts = await asyncio.gather(*tasks)
        assert all(counts)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
async def test_tls_1_1_is_refused(tmp_path: Path, authority: Authority) -> None:
    async with tls_stage(tmp_path, authority.issue()) as (stage, _):
        for version, accepted in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=authority.pem.decode())
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.set_alpn_protocols(["h2"])
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.maximum_version = version
            port = stage.server.port
            if accepted:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
                writer.transport.abort()
            else:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def test_a_unix_socket_is_plain_text_and_has_the_permissions_from_the_start(
    tmp_path: Path, authority: Authority
) -> None:
    path = tmp_path / "grpc"
    certificates = Certificates(written(tmp_path, authority.issue()))
    settings = GrpcSettings(listen="127.0.0.1:0", unix_socket=str(path), unix_socket_mode="0620")
    umask = os.umask(0o022)
    os.umask(umask)
    async with served(grpc_settings=settings, certificates=certificates) as stage:
        one_worker(stage.fleet)
        assert path.stat().st_mode & 0o777 == 0o620
        assert os.umask(umask) == umask  # as it was
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = fleet_pb2_grpc.FleetStub(channel)
            answer = await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=CALL_S)
        assert len(answer.workers) == 1
