"""Autoscalers, monitors of relays, the API's port, and `helm test`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import helm_python as helm
import pytest
import yaml
from click.testing import CliRunner
from typing_extensions import override

from router.app.main import cli
from tests.helm.rendered import EXAMPLES, Object, Rendered, values_of

# --- autoscalers ----------------------------------------------------------------------------------


def test_an_autoscaler_owns_the_number_of_routers(render: Callable[..., Rendered]) -> None:
    rendered = render(**values_of("nats-cluster"))
    scaler = rendered["horizontalpodautoscaler.yaml"]["spec"]
    deployment = rendered["deployment.yaml"]
    assert deployment["spec"]["replicas"] == scaler["minReplicas"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 6)
    assert "poddisruptionbudget.yaml" in rendered


@pytest.mark.parametrize(("there", "rendered"), [(None, 2), (0, 2), (1, 2), (3, 3), (6, 6), (9, 6)])
def test_an_upgrade_to_an_autoscaler_keeps_the_routers_that_are_there(
    chart: helm.Chart, there: int | None, rendered: int
) -> None:
    """A manifest without the number would leave one of them."""
    values = {
        "autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 6},
        "nats": {"server": {"enabled": True}},
    }
    with cluster({} if there is None else {"demo-kvroute": {"spec": {"replicas": there}}}) as url:
        config = helm.Config(kubeconfig_content=KUBECONFIG % url, namespace="inference")
        try:
            texts = config.render(chart, values, name="demo", namespace="inference")
        finally:
            config.close()
    deployment = yaml.safe_load(texts["kvroute/templates/deployment.yaml"])
    assert deployment["spec"]["replicas"] == rendered


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: here, cluster: {server: "%s"}}]
contexts: [{name: here, context: {cluster: here, user: me}}]
users: [{name: me, user: {}}]
"""


@contextmanager
def cluster(deployments: dict[str, Object]) -> Iterator[str]:
    """The URL of an API server that knows these Deployments, and no Secret."""
    kinds = {
        "/apis/apps/v1": ("apps/v1", "deployments", "Deployment"),
        "/api/v1": ("v1", "secrets", "Secret"),
    }

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            answer: Object | None = None
            if path in kinds:
                group, plural, kind = kinds[path]
                resource = {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]}
                resource["singularName"] = ""
                answer = {
                    "kind": "APIResourceList",
                    "apiVersion": "v1",
                    "groupVersion": group,
                    "resources": [resource],
                }
            elif (name := path.removeprefix(DEPLOYMENTS)) in deployments:
                answer = {"apiVersion": "apps/v1", "kind": "Deployment", **deployments[name]}
            status = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            body = json.dumps(answer or status).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


DEPLOYMENTS = "/apis/apps/v1/namespaces/inference/deployments/"


def test_an_autoscaler_needs_nats(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"autoscaling\.enabled needs config\.nats\.url"):
        chart.render({"autoscaling": {"enabled": True}})


def test_engines_follow_their_pools_saturation(render: Callable[..., Rendered]) -> None:
    spec = render(**values_of("gateway-vllm"))["engine-scaledobject.yaml"]["spec"]
    assert spec["scaleTargetRef"] == {"name": "vllm-qwen3-32b"}
    (trigger,) = spec["triggers"]
    pool = 'fleet="default",model="Qwen/Qwen3-32B",role="both"'
    assert trigger["metadata"]["query"] == (
        f'(max(kvroute_pool_requests{{{pool},state="active"}})'
        f' + sum(kvroute_pool_requests{{{pool},state="waiting"}}))'
        f" / max(kvroute_pool_slots{{{pool}}})"
    )
    assert trigger["metadata"]["threshold"] == "0.8"


@pytest.mark.parametrize("missing", ["deployment", "model", "prometheus"])
def test_engines_are_scaled_by_name(chart: helm.Chart, missing: str) -> None:
    whole = {"deployment": "d", "model": "m", "prometheus": "http://p:9090", "enabled": True}
    with pytest.raises(helm.HelmRenderError, match=r"engineScaling\.enabled needs"):
        chart.render({"engineScaling": {**whole, missing: ""}})


# --- relays of one's own --------------------------------------------------------------------------


def test_relays_beside_engines_of_ones_own_are_scraped(render: Callable[..., Rendered]) -> None:
    spec = render(**values_of("nats-cluster"))["relay-podmonitor.yaml"]["spec"]
    assert spec["selector"] == {"matchLabels": {"app": "vllm"}}
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] == "relay-metrics"
    assert endpoint["relabelings"][0]["replacement"] == "default"


def test_a_monitor_of_all_pods_is_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"relayMonitor\.matchLabels"):
        chart.render({"relayMonitor": {"enabled": True}})


# --- OpenAI's API ---------------------------------------------------------------------------------


def test_the_api_is_in_the_service_where_it_listens(
    render: Callable[..., Rendered], default: Rendered
) -> None:
    assert "http" not in {port["name"] for port in default["service.yaml"]["spec"]["ports"]}
    rendered = render(config={"gateway": {"listen": "[::]:8080"}})
    (port,) = [p for p in rendered["service.yaml"]["spec"]["ports"] if p["name"] == "http"]
    assert port["port"] == 8080
    assert {"name": "http", "containerPort": 8080, "protocol": "TCP"} in rendered.router["ports"]
    assert "https://demo-kvroute.inference:8080/v1" in rendered.notes


# --- helm test ------------------------------------------------------------------------------------


def container(rendered: Rendered) -> Object:
    (one,) = rendered["test-workers.yaml"]["spec"]["containers"]
    return one


def test_the_test_calls_a_router_as_a_client_would(default: Rendered) -> None:
    test = default["test-workers.yaml"]
    assert test["metadata"]["annotations"] == {
        "helm.sh/hook": "test",
        "helm.sh/hook-delete-policy": "before-hook-creation",  # logs are read after the pod's end
    }
    assert container(default)["image"] == default.router["image"]
    arguments = container(default)["args"]
    assert "--target=demo-kvroute.inference.svc:50051" in arguments
    mounted = {mount["mountPath"] for mount in container(default)["volumeMounts"]}
    for flag in ("--tls-ca=", "--token-file="):
        (path,) = [one.removeprefix(flag) for one in arguments if one.startswith(flag)]
        assert path.rpartition("/")[0] in mounted
    volumes = {one["name"]: one for one in test["spec"]["volumes"]}
    assert volumes["token"]["secret"]["secretName"] == "demo-kvroute-keys"


@pytest.mark.parametrize("name", ["default", *EXAMPLES])
def test_the_tests_flags_are_the_programs(render: Callable[..., Rendered], name: str) -> None:
    rendered = render(**values_of(name))
    if "test-workers.yaml" not in rendered:
        return
    result = CliRunner().invoke(cli, [*container(rendered)["args"], "--help"])
    assert result.exit_code == 0, result.output


def test_the_test_fails_where_no_worker_is_there(
    default: Rendered, render: Callable[..., Rendered]
) -> None:
    assert "--require=1" in container(default)["args"]
    assert "--require=8" in container(render(helmTest={"workersMin": 8}))["args"]


def test_the_tests_labels_are_no_routers(default: Rendered) -> None:
    labels = default["test-workers.yaml"]["metadata"]["labels"]
    selector = default["service.yaml"]["spec"]["selector"]
    assert not selector.items() <= labels.items()


def test_without_a_token_there_is_no_test(
    production: Rendered, render: Callable[..., Rendered]
) -> None:
    assert "test-workers.yaml" not in production  # its keys are in a Secret of the operator's
    named = render(
        **{**values_of("production"), "helmTest": {"tokenSecret": {"name": "ops", "key": "t"}}}
    )
    volumes = {one["name"]: one for one in named["test-workers.yaml"]["spec"]["volumes"]}
    assert volumes["token"]["secret"]["items"] == [{"key": "t", "path": "token"}]
    rules = named["networkpolicy.yaml"]["spec"]["ingress"]
    labels = named["test-workers.yaml"]["metadata"]["labels"]
    (peer,) = [one for one in rules[0]["from"] if "podSelector" in one]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    mutual = render(tls={"clientCertificates": True, "existingSecret": "mine"})
    assert "test-workers.yaml" not in mutual
