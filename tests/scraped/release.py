"""A release of the chart as Helm would install it, with its files below a folder of this machine
and its ports on loopback; and what its monitors make a Prometheus scrape.

Law: scheme, path, port, TLS, interval and relabelings of a target are those of the rendered
monitor, and a pod that no monitor selects is not scraped. Of the operator's work only this is
imitated here: selectors, ports by name, and the labels namespace, pod, container, service, endpoint
and job.
"""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from tests.scraped.divided import divided
from tests.stage.waiting import free_port

CHART = Path(__file__).parents[2] / "helm" / "kvroute"
NAMESPACE = "inference"
LONGER = 4
"""The interval of scrapes is so many times longer than it would be if it were divided by the whole
factor: on a machine whose cores are all busy a scrape takes half a second, and has to end before
the next one. The shortest window still has five of them."""

Object = dict[str, Any]

_ENDPOINT = {"port", "scheme", "path", "tlsConfig", "interval", "scrapeTimeout", "relabelings"}
_RELABELING = {"action": "action", "targetLabel": "target_label", "replacement": "replacement"}


@dataclass(frozen=True)
class Pod:
    """A process that would be a pod."""

    name: str
    labels: Mapping[str, str]
    container: str
    ports: Mapping[str, int]
    """Name of a container's port -> port on loopback."""


class Release:
    """The rendered objects, and the files of their Secrets."""

    def __init__(self, chart: helm.Chart, values: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        texts = chart.render(values, name="demo", namespace=NAMESPACE)
        del texts["kvroute/templates/NOTES.txt"]
        self.objects: list[Object] = [
            one for text in texts.values() for one in yaml.safe_load_all(text) if one
        ]
        for mount in self._router["volumeMounts"]:
            for volume in self._template["spec"]["volumes"]:
                if volume["name"] == mount["name"] and "secret" in volume:
                    self._write(volume["secret"]["secretName"], mount["mountPath"])

    def of_kind(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    @property
    def rules(self) -> Object:
        """The spec of the PrometheusRule."""
        (rule,) = self.of_kind("PrometheusRule")
        return rule["spec"]

    @property
    def token(self) -> str:
        """The trial's, with all rights."""
        return self.secret("demo-kvroute-keys", "token").decode()

    @property
    def ca(self) -> bytes:
        """Of the routers' certificate, in PEM."""
        return self.secret("demo-kvroute-tls", "ca.crt")

    def secret(self, name: str, key: str) -> bytes:
        (found,) = [one for one in self.of_kind("Secret") if one["metadata"]["name"] == name]
        return base64.b64decode(found["data"][key])

    def router_pod(self, name: str) -> Pod:
        """A pod of the Deployment."""
        ports = {one["name"]: free_port() for one in self._router["ports"]}
        return Pod(name, self._template["metadata"]["labels"], self._router["name"], ports)

    def configuration(self, pod: Pod) -> Object:
        """config.yaml with the pod's ports and this machine's paths."""
        (configmap,) = [
            one for one in self.of_kind("ConfigMap") if "config.yaml" in one.get("data", {})
        ]
        text = configmap["data"]["config.yaml"].replace(
            "/etc/kvroute", f"{self._folder}/etc/kvroute"
        )
        for port in self._router["ports"]:
            text = text.replace(
                f"[::]:{port['containerPort']}", f"127.0.0.1:{pod.ports[port['name']]}"
            )
        if "[::]" in text:
            raise AssertionError(f"an address that is no port of the pod, in:\n{text}")
        return yaml.safe_load(text)

    def scrape_configs(self, pods: list[Pod], factor: float) -> list[Object]:
        """What a Prometheus of the operator would run with, its targets on loopback."""
        found = []
        for monitor in [*self.of_kind("ServiceMonitor"), *self.of_kind("PodMonitor")]:
            spec = monitor["spec"]
            key = "endpoints" if monitor["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
            for place, endpoint in enumerate(spec[key]):
                if unknown := endpoint.keys() - _ENDPOINT:
                    raise ValueError(f"keys of an endpoint that are not known: {sorted(unknown)}")
                if key == "endpoints":
                    targets = list(self._of_services(spec["selector"], endpoint["port"], pods))
                else:
                    targets = list(_of_pods(monitor, endpoint["port"], pods))
                found.append(
                    {
                        # Unique, and the fleet's own; the label is that of the target.
                        "job_name": f"{self._folder.name}/{monitor['metadata']['name']}/{place}",
                        "static_configs": targets,
                        "scheme": endpoint.get("scheme", "http"),
                        "metrics_path": endpoint.get("path", "/metrics"),
                        "scrape_interval": divided(endpoint["interval"], factor / LONGER),
                        # All of it, as a scrape takes as long as ever.
                        "scrape_timeout": divided(endpoint["interval"], factor / LONGER),
                        "relabel_configs": [_relabeling(one) for one in endpoint["relabelings"]],
                        **self._tls(endpoint.get("tlsConfig")),
                    }
                )
        return found

    @property
    def _template(self) -> Object:
        (deployment,) = self.of_kind("Deployment")
        return deployment["spec"]["template"]

    @property
    def _router(self) -> Object:
        return self._template["spec"]["containers"][0]

    def _write(self, secret: str, mount: str) -> None:
        folder = self._folder / mount.removeprefix("/")
        folder.mkdir(parents=True)
        for one in self.of_kind("Secret"):
            if one["metadata"]["name"] == secret:
                for key, value in one["data"].items():
                    (folder / key).write_bytes(base64.b64decode(value))

    def _of_services(self, selector: Object, port: str, pods: list[Pod]) -> Iterator[Object]:
        """A target for each pod behind each port of that name of each Service that is selected."""
        for service in self.of_kind("Service"):
            if not _selected(service["metadata"]["labels"], selector["matchLabels"]):
                continue
            for one in service["spec"]["ports"]:
                for pod in pods:
                    if one["name"] == port and _selected(pod.labels, service["spec"]["selector"]):
                        name = service["metadata"]["name"]
                        labels = {"job": name, "service": name, "endpoint": port}
                        yield _target(pod, one["targetPort"], labels)

    def _tls(self, config: Object | None) -> Object:
        if config is None:
            return {}
        if config.keys() - {"serverName", "ca"}:
            raise ValueError(f"keys of tlsConfig that are not known: {sorted(config)}")
        ca = config["ca"]["secret"]
        file = self._folder / f"scraped-{ca['key']}"
        file.write_bytes(self.secret(ca["name"], ca["key"]))
        return {"tls_config": {"server_name": config["serverName"], "ca_file": str(file)}}


def _of_pods(monitor: Object, port: str, pods: list[Pod]) -> Iterator[Object]:
    name = monitor["metadata"]["name"]
    for pod in pods:
        if _selected(pod.labels, monitor["spec"]["selector"]["matchLabels"]) and port in pod.ports:
            yield _target(pod, port, {"job": f"{NAMESPACE}/{name}", "endpoint": port})


def _selected(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def _target(pod: Pod, port: str, labels: dict[str, str]) -> Object:
    own = {"namespace": NAMESPACE, "pod": pod.name, "container": pod.container}
    return {"targets": [f"127.0.0.1:{pod.ports[port]}"], "labels": own | labels}


def _relabeling(one: Object) -> Object:
    if unknown := one.keys() - _RELABELING.keys():
        raise ValueError(f"keys of a relabeling that are not known: {sorted(unknown)}")
    return {_RELABELING[key]: value for key, value in one.items()}
