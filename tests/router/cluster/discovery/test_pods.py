"""From pods to the settings of their relays."""

import pytest

from events.plane.settings import UnusableEngine
from router.cluster.discovery.pods import Plan, endpoints, settings_of
from router.cluster.discovery.watched import Pod

PLAN = Plan((8000,), 5557, 5558, "host")


def pod(ip: str = "10.0.0.7", role_label: str = "", **annotations: str) -> Pod:
    said = {f"kvroute.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    labels = {"llm-d.ai/role": role_label} if role_label else {}
    return Pod("vllm-0", "uid", ip, "node-a", True, False, False, labels, said)


def test_a_pods_name_is_its_workers_id_and_its_ip_the_address() -> None:
    (endpoint,) = endpoints(pod(), PLAN)
    assert (endpoint.worker_id, endpoint.address) == ("vllm-0", "http://10.0.0.7:8000")
    settings = settings_of(pod(), endpoint, PLAN, "vllm", {"zone": "a", "rack": "r7"})
    assert settings.id == "vllm-0"
    assert settings.engine == "vllm"
    assert settings.events == "tcp://10.0.0.7:5557"
    assert settings.replay == "tcp://10.0.0.7:5558"
    assert settings.labels == {"zone": "a", "rack": "r7", "host": "node-a"}


def test_labels_that_routing_names_are_the_worker_s_too() -> None:
    plan = PLAN._replace(copied_labels=("revision", "track"))
    found = pod()._replace(labels={"revision": "v2", "app": "vllm"})
    (endpoint,) = endpoints(found, plan)
    settings = settings_of(found, endpoint, plan, "vllm", {"zone": "a"})
    assert settings.labels == {"zone": "a", "host": "node-a", "revision": "v2"}


def test_ipv6_stands_in_brackets() -> None:
    (endpoint,) = endpoints(pod("fd00::7"), PLAN)
    assert endpoint.address == "http://[fd00::7]:8000"
    settings = settings_of(pod("fd00::7"), endpoint, PLAN, "vllm", {})
    assert settings.events == "tcp://[fd00::7]:5557"


def test_each_port_of_several_is_a_worker_with_its_own_events() -> None:
    plan = PLAN._replace(ports=(8000, 8001))
    both = endpoints(pod(), plan)
    assert [each.worker_id for each in both] == ["vllm-0-8000", "vllm-0-8001"]
    settings = settings_of(pod(), both[1], plan, "vllm", {})
    assert settings.address == "http://10.0.0.7:8001"
    assert (settings.events, settings.replay) == ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5559")


def test_annotations_say_what_the_engine_does_not() -> None:
    said = pod(
        slots="64", warm="true", kv_connector="NixlConnector", block_size="32", bootstrap_port="9"
    )
    (endpoint,) = endpoints(said, PLAN)
    settings = settings_of(said, endpoint, PLAN, "vllm", {})
    assert (settings.slots, settings.warm, settings.block_size) == (64, True, 32)
    assert (settings.kv_connector, settings.bootstrap_port) == ("NixlConnector", 9)


def test_ports_may_be_a_pods_own_or_absent() -> None:
    said = pod(port="30000", events_port="6000", replay_port="none")
    (endpoint,) = endpoints(said, PLAN)
    settings = settings_of(said, endpoint, PLAN, "sglang", {})
    assert settings.address == "http://10.0.0.7:30000"
    assert (settings.events, settings.replay) == ("tcp://10.0.0.7:6000", None)
    silent = pod(events_port="none")
    assert settings_of(silent, endpoint, PLAN, "vllm", {}).events is None


def test_the_role_is_a_label() -> None:
    (endpoint,) = endpoints(pod(), PLAN)
    assert settings_of(pod(role_label="prefill"), endpoint, PLAN, "vllm", {}).role == "prefill"
    assert settings_of(pod(role_label="router"), endpoint, PLAN, "vllm", {}).role is None


@pytest.mark.parametrize(
    ("annotations", "complaint"),
    [
        ({"slots": "many"}, r"kvroute\.io/slots: 'many' is no number"),
        ({"slots": "0"}, "slots"),
        ({"slotz": "3"}, r"kvroute\.io/slotz: kvroute has no such annotation"),
        ({"warm": "yes"}, r"kvroute\.io/warm: 'yes' is neither"),
        ({"events_port": "tcp://x"}, r"kvroute\.io/events-port"),
        ({"events_port": "99999"}, "events"),
        ({"role": "king"}, "role"),
        ({"address": "http://elsewhere"}, "kvroute has no such annotation"),
    ],
)
def test_an_annotation_that_can_not_be_used_is_named(
    annotations: dict[str, str], complaint: str
) -> None:
    said = pod(**annotations)
    (endpoint,) = endpoints(said, PLAN)
    with pytest.raises(UnusableEngine, match=complaint):
        settings_of(said, endpoint, PLAN, "vllm", {})
