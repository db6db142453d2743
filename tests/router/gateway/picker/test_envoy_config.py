"""What `kvroute envoy-config` sets against Envoy's defaults; tests/envoy runs it."""

from typing import Any

import pytest

from router.gateway.picker.calls import EXT_PROC
from router.gateway.picker.envoy_config import Address, envoy_config
from router.gateway.picker.messages import ENDPOINT, LB, SERVED


def config(**more: Any) -> dict[str, Any]:
    return envoy_config(
        listen=Address("127.0.0.1", 8000),
        admin=None,
        pickers=[Address("127.0.0.1", 9002)],
        workers=[Address("10.0.0.1", 8000)],
        **more,
    )["static_resources"]


def manager(resources: dict[str, Any]) -> Any:
    return resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def test_long_answers_and_many_requests_have_room() -> None:
    resources = config()
    for cluster in resources["clusters"]:
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        assert limits["max_requests"] == limits["max_connections"] == 40_000
    assert manager(resources)["stream_idle_timeout"] == "0s"
    route = manager(resources)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    assert (route["timeout"], route["idle_timeout"]) == ("0s", "0s")


def test_the_endpoint_stands_where_the_picker_puts_it() -> None:
    (fleet,) = (each for each in config()["clusters"] if each["name"] == "fleet")
    (policy,) = fleet["load_balancing_policy"]["policies"]
    override = policy["typed_extension_config"]["typed_config"]
    (source,) = override["override_host_sources"]
    assert source["metadata"] == {"key": LB, "path": [{"key": ENDPOINT}]}
    assert override["selected_host_key"] == {"key": LB, "path": [{"key": SERVED}]}


def test_a_dead_picker_is_seen_before_requests_fail() -> None:
    (pickers,) = (each for each in config()["clusters"] if each["name"] == "kvroute")
    (check,) = pickers["health_checks"]
    assert check["no_traffic_interval"] == "1s"
    assert check["grpc_health_check"] == {"service_name": EXT_PROC}
    assert pickers["common_lb_config"]["healthy_panic_threshold"] == {"value": 0}
    assert manager(config())["http_filters"][0]["typed_config"]["failure_mode_allow"]


@pytest.mark.parametrize(("retries", "has_policy"), [(0, False), (2, True)])
def test_without_retries_there_is_no_retry_policy(*, retries: int, has_policy: bool) -> None:
    """Envoy sends the body of a request with trailers twice where there is one."""
    resources = config(retries=retries)
    route = manager(resources)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    assert ("retry_policy" in route) is has_policy
    assert "http_protocol_options" not in manager(resources)  # HTTP/1.1's trailers are dropped


@pytest.mark.parametrize(("shows", "mode"), [(True, "FULL_DUPLEX_STREAMED"), (False, "NONE")])
def test_answers_go_through_the_picker_or_around_it(*, shows: bool, mode: str) -> None:
    processing = manager(config(shows_answers=shows))["http_filters"][0]["typed_config"]
    assert processing["processing_mode"]["response_body_mode"] == mode
    assert processing["processing_mode"]["request_body_mode"] == "FULL_DUPLEX_STREAMED"
