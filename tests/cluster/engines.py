"""Deployments of simulated engines, from kvroute's own image."""

from collections.abc import Sequence
from typing import Any

from tests.cluster.images import KVROUTE

MODEL = "stand-in"
PORT = 8000
SELECTOR = {"kvroute-test": "engine"}


def deployment(
    name: str = "engine",
    replicas: int = 3,
    *,
    model: str = MODEL,
    arguments: Sequence[str] = (),
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    grace_s: int = 30,
) -> dict[str, Any]:
    """A Deployment named `name`, found by SELECTOR; `arguments` are more flags of
    `kvroute simulate`, `grace_s` is the pods' terminationGracePeriodSeconds."""
    of_pod = {"app": name, **SELECTOR, **(labels or {})}
    command = ["simulate", "--engines=1", "--host=::", f"--port={PORT}", f"--model={model}"]
    command += ["--events-port=5557"]
    container = {
        "name": "engine",
        "image": KVROUTE,
        "args": [*command, *arguments],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "50m", "memory": "96Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": of_pod, "annotations": annotations or {}},
                "spec": {
                    "enableServiceLinks": False,
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": grace_s,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container],
                    "volumes": [{"name": "tmp", "emptyDir": {}}],
                },
            },
        },
    }


def found(**more: Any) -> dict[str, Any]:
    """Values of a release with the gateway, whose discovery finds the pods of `deployment`."""
    selector = ",".join(f"{name}={value}" for name, value in SELECTOR.items())
    kubernetes = {"enabled": True, "selector": selector, "ports": [PORT]}
    return {
        "config": {
            "gateway": {"listen": "[::]:8080"},
            "discovery": {"kubernetes": kubernetes},
            **more.pop("config", {}),
        },
        **more,
    }
