"""Certificates and keys of the chart; the rendered configuration, started and called."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import helm_python as helm
import msgspec
import pytest
import yaml

from kvroute.client import KvRouteClient, Unauthenticated
from router.app.processes.router_process import RouterApp
from tests.helm.rendered import Rendered, program_config


def mounted(rendered: Rendered, template: str, folder: Path) -> None:
    """Writes a Secret's files."""
    for name, text in rendered[template]["data"].items():
        (folder / name).write_bytes(base64.b64decode(text))


async def test_the_default_release_starts_with_tls_and_keys_and_answers_probes(
    default: Rendered, tmp_path: Path
) -> None:
    for template in ("tls-secret.yaml", "keys-secret.yaml"):
        mounted(default, template, tmp_path)
    config = program_config(default, tmp_path)
    replace = msgspec.structs.replace
    config = replace(
        config,
        grpc=replace(config.grpc, listen="0.0.0.0:0"),
        metrics=replace(config.metrics, listen="127.0.0.1:0"),
        probes=replace(config.probes, listen="127.0.0.1:0"),
        nats=replace(config.nats, url="nats://127.0.0.1:1"),
        tls=replace(
            config.tls,
            certificate_file=str(tmp_path / Path(str(config.tls.certificate_file)).name),
            key_file=str(tmp_path / Path(str(config.tls.key_file)).name),
        ),
        keys=replace(config.keys, file=str(tmp_path / Path(str(config.keys.file)).name)),
    )
    app = RouterApp(config)
    try:
        await app.start()
        async with aiohttp.ClientSession() as kubelet:
            codes = []
            for ready in (False, True):
                app.core.fleet.ready = ready
                for probe in ("startup", "readiness", "liveness"):
                    path = default.router[f"{probe}Probe"]["httpGet"]["path"]
                    async with kubelet.get(
                        f"http://127.0.0.1:{app.listeners.probes_port}{path}"
                    ) as answer:
                        codes.append(answer.status)
            assert codes == [503, 503, 200, 200, 200, 200]
        credentials = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
        target = f"127.0.0.1:{app.listeners.grpc_port}"
        token = (tmp_path / "token").read_text(encoding="ascii")
        for name in ("demo-kvroute.inference.svc", "demo-kvroute-headless.inference", "localhost"):
            options = (("grpc.ssl_target_name_override", name),)
            async with KvRouteClient(
                target, credentials=credentials, channel_options=options, token=token
            ) as client:
                assert await client.list_workers() == []
        async with KvRouteClient(
            target, credentials=credentials, channel_options=options
        ) as client:
            with pytest.raises(Unauthenticated):
                await client.list_workers()
    finally:
        await app.stop()


def test_the_pod_sees_hashes_of_tokens_only(default: Rendered) -> None:
    volumes = {
        volume["name"]: volume["secret"]
        for volume in default.pod["spec"]["volumes"]
        if "secret" in volume
    }
    assert volumes["keys"]["items"] == [{"key": "keys.yaml", "path": "keys.yaml"}]
    assert volumes["tls"]["secretName"] == "demo-kvroute-tls"


def test_secrets_of_ones_own_take_the_place_of_the_charts(
    production: Rendered, render: Callable[..., Rendered]
) -> None:
    assert "tls-secret.yaml" not in production
    assert "keys-secret.yaml" not in production
    certificate = production["certificate.yaml"]["spec"]
    assert certificate["secretName"] == "demo-kvroute-tls"
    assert "demo-kvroute-headless.inference.svc" in certificate["dnsNames"]
    own = render(tls={"existingSecret": "mine", "clientCertificates": True})
    assert "tls-secret.yaml" not in own
    assert "client_ca_file: /etc/kvroute-tls/ca.crt" in own.config_text


def test_a_release_without_keys_needs_the_switch_and_is_warned_of(
    chart: helm.Chart, render: Callable[..., Rendered]
) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"config\.grpc\.any_address"):
        chart.render({"keys": {"enabled": False}})
    rendered = render(keys={"enabled": False}, config={"grpc": {"any_address": True}})
    assert "WARNING: all that reach the routers" in rendered.notes
    assert "keys" not in rendered.config_text.split("log:")[0]


def test_the_engines_key_is_mounted_where_the_router_reads_it(
    default: Rendered, render: Callable[..., Rendered]
) -> None:
    assert "api_key_file" not in default.config_text
    rendered = render(
        keys={"engineSecret": {"name": "vllm", "key": "api-key"}},
        config={"engines": {"ca_file": "/ca.pem"}},
    )
    engines = yaml.safe_load(rendered["configmap.yaml"]["data"]["config.yaml"])["engines"]
    assert engines["ca_file"] == "/ca.pem"
    mounts = {mount["name"]: mount["mountPath"] for mount in rendered.router["volumeMounts"]}
    (volume,) = [one for one in rendered.pod["spec"]["volumes"] if one["name"] == "engine-key"]
    (item,) = volume["secret"]["items"]
    assert volume["secret"]["secretName"] == "vllm"
    assert item["key"] == "api-key"
    assert engines["api_key_file"] == f"{mounts['engine-key']}/{item['path']}"


@pytest.mark.parametrize("discovery", [False, True])
@pytest.mark.parametrize("accounts", [False, True])
def test_accounts_get_the_pods_token_and_a_way_to_kubernetes(
    render: Callable[..., Rendered], accounts: bool, discovery: bool
) -> None:
    pods = {"enabled": discovery, "selector": "app=vllm"}
    rendered = render(
        keys={"existingSecret": "mine", "accounts": accounts},
        config={"discovery": {"kubernetes": pods}},
        networkPolicy={"enabled": True, "kubernetesTo": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
    )
    needed = accounts or discovery
    assert rendered.pod["spec"]["automountServiceAccountToken"] is needed
    ways = [
        rule
        for rule in rendered["networkpolicy.yaml"]["spec"]["egress"]
        if {"port": 6443, "protocol": "TCP"} in rule["ports"]
    ]
    assert len(ways) == needed
    assert all(rule["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}] for rule in ways)
    assert ("role.yaml" in rendered) == discovery  # verifying a token takes no right


def test_accounts_without_a_key_file_are_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmRenderError, match=r"keys\.accounts needs keys\.existingSecret"):
        chart.render({"keys": {"accounts": True}})


def test_a_release_with_secrets_of_its_own_renders_alike_each_time(chart: helm.Chart) -> None:
    """What docs/kubernetes.md says of tools that render without a cluster, such as Argo CD."""
    made = {"keys-secret", "tls-secret", "ca-configmap", "nats-secret"}
    assert changed(chart, {"nats": {"server": {"enabled": True}}}) == made
    values = {
        "keys": {"existingSecret": "keys"},
        "tls": {"existingSecret": "tls"},
        "config": {"nats": {"url": "tls://nats:4222"}},
        "nats": {"tlsSecret": {"name": "nats-ca"}, "userSecret": {"name": "nats-user"}},
    }
    assert changed(chart, values) == set()
    certificates = {"certManager": {"enabled": True, "issuerRef": {"name": "internal"}}}
    assert changed(chart, values | {"tls": certificates}) == set()


def changed(chart: helm.Chart, values: dict[str, Any]) -> set[str]:
    """Templates that two renderings of the same values have not alike."""
    first, second = (chart.render(values, name="kvroute", namespace="n") for _ in range(2))
    return {Path(path).stem for path in first if first[path] != second[path]}
