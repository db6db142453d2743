"""grpcurl and grpc_health_probe, as operators use them, against `kvroute serve`."""

import json

import pytest

from tests.interop.binaries import GRPCURL, PROBE
from tests.interop.fleet import Router, Secured
from tests.interop.stage import run

SERVICES = ("kvroute.v1.Fleet", "kvroute.v1.Prompts", "kvroute.v1.Router", "grpc.health.v1.Health")


@pytest.fixture(params=["plain", "tls", "mutual"])
def place(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A router's address; the flags of grpcurl, and of the probe, for it."""
    serving: Router | Secured = request.getfixturevalue(request.param)
    if isinstance(serving, Router):
        return f"localhost:{serving.port}", ("-plaintext",), ()
    keys = {"cert": serving.certificate, "key": serving.key} if request.param == "mutual" else {}
    probe = {"ca-cert": serving.ca} | {f"client-{name}": path for name, path in keys.items()}
    return (
        f"localhost:{serving.router.port}",
        tuple(f"-{name}={path}" for name, path in ({"cacert": serving.ca} | keys).items()),
        ("-tls", *(f"-tls-{name}={path}" for name, path in probe.items())),
    )


Place = tuple[str, tuple[str, ...], tuple[str, ...]]


async def test_grpcurl_lists_describes_and_calls(place: Place) -> None:
    target, flags, _ = place
    code, listed = await run(GRPCURL.path, *flags, target, "list")
    assert code == 0, listed
    assert set(SERVICES) <= set(listed.split())
    code, described = await run(GRPCURL.path, *flags, target, "describe", "kvroute.v1.Router.Route")
    assert (code, "RouteRequest" in described) == (0, True), described
    request = json.dumps({"model": "m", "token_ids": {"ids": [1, 2, 3, 4]}})
    command = (GRPCURL.path, *flags, "-d", request, target)
    code, answer = await run(*command, "kvroute.v1.Router/Route")
    assert code == 0, answer
    assert json.loads(answer)["worker_id"].startswith("m-")
    code, refused = await run(
        *command[:-2], '{"model": "nobody"}', target, "kvroute.v1.Router/Route"
    )
    assert code != 0
    assert "google.rpc.ErrorInfo" in refused


@pytest.mark.parametrize(
    ("service", "said"),
    [("", 0), ("liveness", 0), ("readiness", 0), ("kvroute.v1.Router", 0), ("nobody", 3)],
)
async def test_the_probe_of_health(place: Place, service: str, said: int) -> None:
    target, _, flags = place
    code, output = await run(PROBE.path, f"-addr={target}", f"-service={service}", *flags)
    assert code == said, output
