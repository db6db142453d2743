"""A release of the chart on the cluster, by real Helm."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cluster import Cluster
from tests.cluster.node import until

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvroute"
WAIT = "5m"


class Release:
    """The release `kvroute` in a namespace of its own, which ends with it."""

    def __init__(
        self, cluster: Cluster, namespace: str, helm: str = "helm", security: str = "restricted"
    ) -> None:
        """`helm` is the program: "helm" is Helm 3, "helm4" is Helm 4. `security` is the Pod
        Security Standard that the namespace enforces."""
        self.cluster, self.namespace, self.program = cluster, namespace, helm
        strict = {f"pod-security.kubernetes.io/{mode}": security for mode in ("enforce", "warn")}
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": namespace, "labels": strict},
            }
        )

    def helm(self, verb: str, *arguments: str) -> str:
        """What `helm VERB kvroute` prints, its warnings too."""
        ran = self.cluster.run(
            self.program, verb, "kvroute", *arguments, "--namespace", self.namespace, cwd=ROOT
        )
        return ran.stdout + ran.stderr

    def install(self, values: Mapping[str, Any] | None = None, *arguments: str) -> str:
        """Installs and waits until all is ready."""
        return self._with_values("install", values, *arguments)

    def upgrade(self, values: Mapping[str, Any] | None = None, *arguments: str) -> str:
        return self._with_values("upgrade", values, *arguments)

    def _with_values(self, verb: str, values: Mapping[str, Any] | None, *arguments: str) -> str:
        file = self.cluster.folder / f"values-{self.namespace}.yaml"
        file.write_text(yaml.safe_dump(dict(values or {})))
        return self.helm(verb, str(CHART), "-f", str(file), "--wait", "--timeout", WAIT, *arguments)

    def uninstall(self) -> None:
        self.helm("uninstall", "--wait", "--timeout", WAIT)

    def end(self) -> None:
        """Ends the namespace with all in it."""
        self.cluster.kubectl(
            "delete", "namespace", self.namespace, "--wait=true", "--timeout=300s", timeout=360
        )

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, input=input)

    def get(self, *arguments: str) -> Any:
        return self.cluster.get("--namespace", self.namespace, *arguments)

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Applies objects in the release's namespace."""
        of_here = [
            {**one, "metadata": {"namespace": self.namespace, **one["metadata"]}} for one in objects
        ]
        self.cluster.apply(*of_here)

    def secret(self, name: str, key: str) -> str:
        data = self.get("secret", name)["data"]
        return base64.b64decode(data[key]).decode()

    def service(self, port: int) -> str:
        """ADDRESS:PORT of the routers' Service."""
        address = self.get("service", "kvroute")["spec"]["clusterIP"]
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def client(self, model: str, token: str = "") -> dict[str, Any]:
        """The options by which `Load` calls the gateway of the release."""
        ca = self.cluster.folder / f"ca-{self.namespace}.crt"
        ca.write_text(self.secret("kvroute-tls", "ca.crt"))
        return {
            "url": f"https://{self.service(8080)}/v1/chat/completions",
            "host": f"kvroute.{self.namespace}.svc",
            "ca": str(ca),
            "token": token or self.secret("kvroute-keys", "token"),
            "model": model,
        }

    def workers(self, token: str = "") -> list[dict[str, Any]]:
        """The workers of `kvroute workers --json`."""
        options = self.client("", token)
        file = self.cluster.folder / f"token-{self.namespace}"
        file.write_text(options["token"])
        ran = self.cluster.run(
            *("kvroute", "workers", "--json", "--target", self.service(50051), "--timeout=30"),
            *("--tls-ca", options["ca"], "--token-file", str(file), "--tls-name", options["host"]),
            check=False,  # no router answers
        )
        found: list[dict[str, Any]] = json.loads(ran.stdout or "{}").get("workers", [])
        return found

    def logs(self) -> str:
        """What the routers' pods that have begun have written."""
        which = ("--selector=app.kubernetes.io/component=router", "--tail=-1")
        ran = self.cluster.run(
            "kubectl", "--namespace", self.namespace, "logs", *which, check=False
        )
        return ran.stdout

    def count(self, metric: str, **labels: str) -> float:
        """The sum of a counter's series with these labels over all routers, by their metrics."""
        total = 0.0
        for pod in self.get("pods", "--selector=app.kubernetes.io/component=router"):
            address = pod["status"]["podIP"]
            host = f"[{address}]" if ":" in address else address
            page = self.cluster.run(
                "curl", "--silent", "--show-error", f"http://{host}:9464/metrics"
            )
            for family in text_string_to_metric_families(page.stdout):
                for sample in family.samples:
                    if sample.name == metric and labels.items() <= sample.labels.items():
                        total += sample.value
        return total

    def wait_for_workers(
        self, count: int, timeout_s: float = 120, token: str = ""
    ) -> list[dict[str, Any]]:
        """The workers that can get requests, once they are `count`."""

        def enough() -> list[dict[str, Any]]:
            able = [one for one in self.workers(token) if one.get("schedulable")]
            return able if len(able) == count else []

        try:
            return until(enough, timeout_s, f"{count} workers", every_s=1)
        except TimeoutError as error:
            said = (one.get("unschedulableReason") or one["address"] for one in self.workers(token))
            raise TimeoutError(f"{error}: {list(said)}\n{self.logs()[-2000:]}") from None
