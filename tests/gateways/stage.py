"""A gateway, engines and a router on the cluster, and a client in its network."""

import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.engines import deployment
from tests.cluster.node import until
from tests.cluster.release import Release
from tests.gateways.binaries import folder
from tests.gateways.gateways import OURS, Chart, Gateway, Way, file_of

MODEL = "Qwen/Qwen3-32B"
ENGINES = "vllm-qwen3-32b"


@contextmanager
def addresses(cluster: Cluster) -> Iterator[None]:
    """Each Service of type LoadBalancer gets an address, as a cloud gives one: 10.201.x.y where
    its own is 10.96.x.y. kube-proxy serves it."""
    stopped = threading.Event()

    def give() -> None:
        while not stopped.wait(3):
            for service in cluster.get("services", "--all-namespaces"):
                about, spec = service["metadata"], service["spec"]
                balancer = service["status"]["loadBalancer"]
                if spec["type"] != "LoadBalancer" or balancer.get("ingress"):
                    continue
                ingress = {"ingress": [{"ip": spec["clusterIP"].replace(".96.", ".201.", 1)}]}
                patch = json.dumps({"status": {"loadBalancer": ingress}})
                cluster.run(
                    *("kubectl", "patch", "service", about["name"], "-n", about["namespace"]),
                    *("--subresource=status", "--type=merge", "-p", patch),
                    check=False,  # it may have gone
                )

    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    yield
    stopped.set()
    thread.join()


def install(cluster: Cluster, chart: Chart) -> None:
    """Installs a gateway's chart by Helm, and waits until it is ready."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "chart")
        shutil.copytree(folder(chart.module) / chart.path, copy, copy_function=shutil.copyfile)
        template = copy / "values.tmpl.yaml"
        if template.exists():  # its release fills the names of images in
            (copy / "values.yaml").write_text(re.sub(r"\$\{\w+\}", "", template.read_text()))
        values = Path(scratch, "values.yaml")
        values.write_text(yaml.safe_dump(dict(chart.values or {})))
        files = [values, *(file_of(name, folder) for name in chart.files)]
        cluster.run(
            *("helm", "upgrade", "--install", chart.release, str(copy)),
            *("--namespace", chart.namespace, "--create-namespace", "--wait", "--timeout", "5m"),
            *(word for file in files for word in ("--values", str(file))),
            timeout=360,
        )


class Stage:
    """A gateway before a release of kvroute with two engines."""

    def __init__(self, cluster: Cluster, gateway: Gateway) -> None:
        self.cluster, self.gateway = cluster, gateway
        self.release = Release(cluster, f"before-{gateway.name}")
        self.address = ""

    def install(self) -> None:
        """Installs all, and waits until each way serves."""
        cluster, gateway = self.cluster, self.gateway
        for module, path in gateway.manifests:
            files = str(folder(module) / path)
            cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", files)
        for chart in gateway.charts:
            install(cluster, chart)
        self.release.apply(deployment(ENGINES, 2, model=MODEL))
        for name in gateway.ours:
            self.release.kubectl("apply", "-f", str(OURS / name))
        values = [word for name in gateway.values for word in ("-f", str(OURS / name))]
        self.release.install({"resources": {"requests": {"cpu": "100m"}}}, *values)
        self.release.wait_for_workers(2)
        self.address = until(self._address, 180, "the gateway's address", every_s=1)
        for way in gateway.ways:
            until(lambda way=way: self._serves(way), 180, f"{way.name} serves", every_s=1)

    def end(self) -> None:
        """Removes the gateway and the release, without waiting for drains."""
        self.release.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
        self.release.end()
        for chart in reversed(self.gateway.charts):
            self.cluster.run(
                *("helm", "uninstall", chart.release, "--namespace", chart.namespace, "--wait"),
                check=False,  # it may not have come so far
            )
        for namespace in self.gateway.namespaces:
            self.cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found")

    def _address(self) -> str:
        status = self.release.get(*self.gateway.address).get("status", {})
        found = [*status.get("addresses", ()), *status.get("loadBalancer", {}).get("ingress", ())]
        return next((one.get("value") or one["ip"] for one in found), "")

    def _serves(self, way: Way) -> bool:
        status, answer = self.chat(way, "Hello", 4)
        return status == 200 and "choices" in answer

    def client(self, way: Way) -> dict[str, Any]:
        """The options by which `Load` goes this way."""
        options = {"url": f"http://{self.address}/v1/chat/completions", "model": MODEL}
        options["host"] = way.host
        if not way.picker:
            options["token"] = self.release.secret("kvroute-keys", "token")
        return options

    def chat(
        self, way: Way, content: Any, tokens: int, *, stream: bool = False, leave_s: float = 300
    ) -> tuple[int, str]:
        """Status and answer of one chat; the client leaves after `leave_s`."""
        options = self.client(way)
        body = {
            "model": MODEL,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
            "messages": [{"role": "user", "content": content}],
        }
        headers = ["Content-Type: application/json", f"Host: {way.host}", "Expect:"]
        if "token" in options:
            headers.append(f"Authorization: Bearer {options['token']}")
        ran = self.cluster.run(
            *("curl", "--silent", "--no-buffer", "--max-time", str(leave_s), options["url"]),
            *(word for header in headers for word in ("--header", header)),
            *("--data-binary", "@-", "--write-out", "\n%{http_code}"),
            input=json.dumps(body),
            check=False,
        )
        answer, _, status = ran.stdout.rpartition("\n")
        return int(status), answer
