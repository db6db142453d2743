"""Services, ports, network policies and monitors."""

import base64
from collections.abc import Callable
from typing import Any

import helm_python as helm
import pytest
import yaml
from cryptography import x509

from tests.helm.rendered import EXAMPLES, Object, Rendered, values_of

# --- services, account, budget --------------------------------------------------------------------


def test_service_exposes_grpc_and_metrics(default: Rendered) -> None:
    ports = {port["name"]: port for port in default["service.yaml"]["spec"]["ports"]}
    assert {name: port["port"] for name, port in ports.items()} == {"grpc": 50051, "metrics": 9464}
    assert all(port["targetPort"] == name for name, port in ports.items())


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("metrics", ["off", "server", "mutual"])
def test_services_say_https_wherever_a_port_speaks_tls(
    render: Callable[..., Rendered], tls: bool, metrics: str
) -> None:
    rendered = render(
        tls={"enabled": tls},
        config={
            "gateway": {"listen": "[::]:8080"},
            "metrics": {"tls": metrics},
        },
    )
    plain = {"grpc": "grpc", "http": "http", "metrics": "http"}
    encrypted = dict.fromkeys(plain, tls) | {"metrics": metrics != "off"}
    for service in ("service.yaml", "service-headless.yaml"):
        for port in rendered[service]["spec"]["ports"]:
            name = port["name"]
            assert port["appProtocol"] == ("https" if encrypted[name] else plain[name]), name


def test_a_monitor_calls_metrics_over_tls_as_they_are_served(
    render: Callable[..., Rendered], chart: helm.Chart
) -> None:
    def endpoint(tls: str, **monitor: Any) -> Object:
        values = {"metrics": {"tls": tls}}
        rendered = render(config=values, serviceMonitor={"enabled": True, **monitor})
        (one,) = rendered["servicemonitor.yaml"]["spec"]["endpoints"]
        return one

    assert not {"scheme", "tlsConfig"} & endpoint("off").keys()
    over_tls = endpoint("server")
    assert over_tls["scheme"] == "https"
    secret = render()["tls-secret.yaml"]
    named = over_tls["tlsConfig"]["ca"]["secret"]
    assert named["name"] == secret["metadata"]["name"]
    assert named["key"] in secret["data"]
    pem = base64.b64decode(secret["data"]["tls.crt"])
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    known = names.value.get_values_for_type(x509.DNSName)
    assert over_tls["tlsConfig"]["serverName"] in known
    own = {"ca": {"configMap": {"name": "cas", "key": "c"}}, "certFile": "/c", "keyFile": "/k"}
    assert endpoint("mutual", tlsConfig=own)["tlsConfig"] == own
    with pytest.raises(helm.HelmRenderError, match=r"needs serviceMonitor\.tlsConfig"):
        chart.render(
            {"config": {"metrics": {"tls": "mutual"}}, "serviceMonitor": {"enabled": True}}
        )


def test_headless_service_lists_ready_routers_for_grpc_alone(default: Rendered) -> None:
    spec = default["service-headless.yaml"]["spec"]
    assert spec["clusterIP"] == "None"
    assert not spec.get("publishNotReadyAddresses")
    assert [port["name"] for port in spec["ports"]] == ["grpc"]


def test_ports_follow_the_listen_addresses(render: Callable[..., Rendered]) -> None:
    rendered = render(
        config={"grpc": {"listen": "0.0.0.0:6000"}, "metrics": {"listen": "[::]:6001"}},
        networkPolicy={"enabled": True},
    )
    assert [port["port"] for port in rendered["service.yaml"]["spec"]["ports"]] == [6000, 6001]
    assert [port["containerPort"] for port in rendered.router["ports"]] == [6000, 9466, 6001]


def test_without_a_metrics_endpoint_nothing_speaks_of_metrics(
    render: Callable[..., Rendered], chart: helm.Chart
) -> None:
    values: dict[str, Any] = {"config": {"metrics": {"listen": ""}}}
    rendered = render(**values, networkPolicy={"enabled": True})
    assert [port["name"] for port in rendered["service.yaml"]["spec"]["ports"]] == ["grpc"]
    assert [port["name"] for port in rendered.router["ports"]] == ["grpc", "probes"]
    assert len(rendered["networkpolicy.yaml"]["spec"]["ingress"]) == 1
    with pytest.raises(helm.HelmRenderError, match=r"needs config\.metrics\.listen"):
        chart.render({**values, "serviceMonitor": {"enabled": True}})


# --- networkpolicy.yaml ---------------------------------------------------------------------------


def test_network_policy_is_optional(default: Rendered) -> None:
    assert "networkpolicy.yaml" not in default


def test_network_policy_lets_in_callers_and_scrapers_and_out_dns_and_nats(
    production: Rendered,
) -> None:
    spec = production["networkpolicy.yaml"]["spec"]
    assert spec["podSelector"] == production["deployment.yaml"]["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]

    def namespace(peers: list[Object]) -> str:
        (peer,) = peers
        return peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]

    grpc, metrics = spec["ingress"]
    assert grpc["ports"] == [{"port": "grpc", "protocol": "TCP"}]
    assert namespace(grpc["from"]) == "gateway"
    assert metrics["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    assert namespace(metrics["from"]) == "monitoring"
    dns, nats = spec["egress"]
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert nats["ports"] == [{"port": 4222, "protocol": "TCP"}]
    assert namespace(nats["to"]) == "messaging"


@pytest.mark.parametrize(
    ("url", "port"),
    [("nats://nats", 4222), ("tls://nats.example:14222/", 14222), ("nats://[fd00::1]", 4222)],
)
def test_network_policy_takes_the_port_from_the_nats_url(
    render: Callable[..., Rendered], url: str, port: int
) -> None:
    rendered = render(
        networkPolicy={"enabled": True}, config={"nats": {"url": url, "allow_plaintext": True}}
    )
    _, nats = rendered["networkpolicy.yaml"]["spec"]["egress"]
    assert nats == {"ports": [{"port": port, "protocol": "TCP"}]}


def test_network_policy_that_cuts_off_configured_engines_is_refused(
    chart: helm.Chart, render: Callable[..., Rendered]
) -> None:
    values = values_of("small-fleet")
    with pytest.raises(helm.HelmRenderError, match=r"networkPolicy\.extraEgress"):
        chart.render({**values, "networkPolicy": {"enabled": True}})
    rule = {"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}
    rendered = render(**values, networkPolicy={"enabled": True, "extraEgress": [rule]})
    assert rendered["networkpolicy.yaml"]["spec"]["egress"][-1] == rule


# --- servicemonitor.yaml, example-engine-podmonitor.yaml ------------------------------------------


def test_monitors_are_rendered_only_on_demand(default: Rendered, production: Rendered) -> None:
    assert "servicemonitor.yaml" not in default
    assert "servicemonitor.yaml" in production
    assert "example-engine-podmonitor.yaml" not in production


def test_service_monitor_scrapes_each_router_once_and_names_its_fleet(production: Rendered) -> None:
    monitor = production["servicemonitor.yaml"]
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (endpoint,) = monitor["spec"]["endpoints"]
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [
        template
        for template in ("service.yaml", "service-headless.yaml")
        if selector <= production[template]["metadata"]["labels"].items()
        and endpoint["port"] in {p["name"] for p in production[template]["spec"]["ports"]}
    ]
    assert scraped == ["service.yaml"]
    assert endpoint["relabelings"] == [
        {"action": "replace", "targetLabel": "fleet", "replacement": "chat-eu"}
    ]


def test_pod_monitor_scrapes_the_relays(with_engine: Rendered) -> None:
    spec = with_engine["example-engine-podmonitor.yaml"]["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in with_engine.relay["ports"]}
    assert endpoint["relabelings"][0]["replacement"] == "default"
    engine = with_engine["example-engine.yaml"]["spec"]
    assert spec["selector"] == engine["selector"]


# --- all policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_exactly_the_ports_that_serve_others_are_let_in(
    render: Callable[..., Rendered], name: str
) -> None:
    rendered = render(**{**values_of(name), **_with_policy(name)})
    ports = {port["name"] for port in rendered.router["ports"]}
    policy = rendered["networkpolicy.yaml"]["spec"]
    let_in = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert sorted(let_in) == sorted(ports - {"probes"})  # the kubelet's own, on its node
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    if "nats-statefulset.yaml" not in rendered:
        assert "nats-networkpolicy.yaml" not in rendered
        return
    nats = rendered["nats-networkpolicy.yaml"]["spec"]
    pod = rendered["nats-statefulset.yaml"]["spec"]
    assert nats["podSelector"] == pod["selector"]
    (server,) = pod["template"]["spec"]["containers"]
    served = [port["port"] for rule in nats["ingress"] for port in rule["ports"]]
    assert sorted(served) == sorted({p["name"] for p in server["ports"]} - {"monitor"})
    assert all(rule["from"] for rule in nats["ingress"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_exactly_the_paths_that_the_configuration_has_are_let_out(
    render: Callable[..., Rendered], name: str
) -> None:
    rendered = render(**{**values_of(name), **_with_policy(name)})
    config = yaml.safe_load(rendered.config_text)
    wanted = {53}
    if config["nats"].get("url"):
        wanted.add(4222)
    discovered = config["discovery"]["kubernetes"]
    serves = config["gateway"]["listen"] or config.get("picker", {}).get("listen")
    if discovered["enabled"]:
        wanted |= {443, 6443, *discovered["ports"], 5557, 5558}
    if discovered["enabled"] or serves:
        wanted.add(8000)  # networkPolicy.enginePorts
    if config["workers"]:
        wanted.add(5557)
    rules = rendered["networkpolicy.yaml"]["spec"]["egress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == wanted


def _with_policy(name: str) -> dict[str, Any]:
    """Values that switch an example's policy on."""
    values = values_of(name)
    policy = {**values.get("networkPolicy", {}), "enabled": True}
    if values.get("config", {}).get("workers"):
        policy["extraEgress"] = [{"ports": [{"port": 5557, "protocol": "TCP"}]}]
    return {"networkPolicy": policy}
