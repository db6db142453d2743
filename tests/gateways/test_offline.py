"""What can be known of the gateways' recipes without a cluster."""

import asyncio
from pathlib import Path
from typing import Any, cast

import helm_python as helm
import pytest
import yaml

from events.engines.pages.probe import EngineHttp, EngineSilent
from kvroute.ext_proc.v3 import ext_proc_pb2 as pb
from router.gateway.picker import messages
from router.gateway.picker.request_stream import RequestStream
from tests.gateways import conformance_epp
from tests.gateways.gateways import GATEWAYS, OURS
from tests.helm.rendered import CHART


def test_each_file_of_the_recipes_is_applied() -> None:
    used = {name for gateway in GATEWAYS for name in (*gateway.ours, *gateway.values)}
    used |= {name for gateway in GATEWAYS for chart in gateway.charts for name in chart.files}
    assert {path.name for path in OURS.glob("*.yaml")} <= used


@pytest.mark.parametrize("gateway", GATEWAYS, ids=lambda gateway: gateway.name)
def test_the_chart_makes_a_route_for_each_host_name(gateway: Any) -> None:
    values: dict[str, Any] = {}
    for name in gateway.values:
        values = _merged(values, yaml.safe_load((OURS / name).read_text()))
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="kvroute", namespace="inference")
    routes = [text for text in texts.values() if "kind: HTTPRoute" in text or "Ingress\n" in text]
    own = "".join((OURS / name).read_text() for name in gateway.ours)
    for way in gateway.ways:
        assert way.host in own or any(way.host in text for text in routes)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = one | other
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            both[key] = _merged(one[key], other[key])
    return both


def test_the_conformance_epp_reads_the_suites_header_and_says_what_served() -> None:
    message = pb.ProcessingRequest()
    header = pb.HeaderValue(key="Test-Epp-Endpoint-Selection", raw_value=b"10.0.0.1, 10.0.0.2:80")
    message.request_headers.headers.headers.append(header)
    assert conformance_epp.subset_of(message) == {"10.0.0.1", "10.0.0.2:80"}
    assert conformance_epp.subset_of(pb.ProcessingRequest(request_headers={})) is None

    sent: list[bytes] = []
    stream = RequestStream(sent.append, lambda: None, body_bytes_max=1)
    answer = pb.ProcessingRequest(response_headers={})
    served = answer.metadata_context.filter_metadata[messages.LB]
    served.update({messages.SERVED: "10.0.0.1:3000"})
    conformance_epp.answered(stream, answer)
    said = pb.ProcessingResponse.FromString(*sent)
    (set_,) = said.response_headers.response.header_mutation.set_headers
    assert (set_.header.key, set_.header.raw_value) == (conformance_epp.SERVED, b"10.0.0.1:3000")


def test_the_conformance_epp_plays_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_page(_engine: EngineHttp, path: str) -> bytes:
        raise EngineSilent(f"{path}: status 404", refused=path == "/refused", status=404)

    monkeypatch.setattr(conformance_epp, "_page", no_page)
    engine = cast("EngineHttp", None)
    assert b"conformance-fake-model" in asyncio.run(conformance_epp.page(engine, "/v1/models"))
    for path in ("/refused", "/version"):
        with pytest.raises(EngineSilent):
            asyncio.run(conformance_epp.page(engine, path))


def test_the_conformance_epp_needs_nothing_of_the_tests() -> None:
    """It is copied alone into kvroute's image."""
    assert "import tests" not in (text := Path(conformance_epp.__file__).read_text())
    assert "from tests" not in text
