"""What a release may do: its rights by the API server's audit log, and service accounts' keys."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster import engines
from tests.cluster.cluster import Cluster
from tests.cluster.node import until
from tests.cluster.release import Release

NAMESPACE = "access"
ISSUER = "https://kubernetes.default.svc.cluster.local"


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    release = Release(cluster, NAMESPACE)
    release.apply(engines.deployment("engine", 2))
    values = engines.found(replicaCount=1)
    values["config"]["discovery"]["kubernetes"]["rack_label"] = "rack"
    release.install(values)
    release.wait_for_workers(2)
    yield release
    release.uninstall()
    release.end()


def audited(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """What the routers of a namespace asked the API server, by its audit log."""
    account = f"system:serviceaccount:{namespace}:kvroute"
    lines = (cluster.folder / "audit.log").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [one for one in events if one["user"]["username"] == account]


def test_rights_are_enough_and_no_wider(cluster: Cluster, release: Release) -> None:
    """Each right of the Role is used, and what is not given is refused."""
    asked = audited(cluster, NAMESPACE)
    refused = [one["requestURI"] for one in asked if one["responseStatus"]["code"] == 403]
    assert refused == []
    used = {(one["verb"], one["objectRef"]["resource"]) for one in asked}
    given = {
        (verb, resource)
        for kind, name in (("role", "kvroute"), ("clusterrole", f"kvroute-{NAMESPACE}-nodes"))
        for rule in release.get(kind, name)["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert used == given
    account = f"--as=system:serviceaccount:{NAMESPACE}:kvroute"
    for verb, resource in (
        ("get", "secrets"),
        ("list", "secrets"),
        ("list", "nodes"),
        ("delete", "pods"),
        ("create", "pods/exec"),
    ):
        ran = cluster.run(
            *("kubectl", "auth", "can-i", verb, resource, account, "--namespace", NAMESPACE),
            check=False,
        )
        assert ran.stdout.strip() == "no", (verb, resource)


def test_a_release_without_rights_says_so_and_goes_on(cluster: Cluster, release: Release) -> None:
    role = release.get("role", "kvroute")
    release.kubectl("delete", "role", "kvroute")
    try:
        # The watch that is open is ended by its own time limit at the latest: a restart is quicker.
        release.kubectl("rollout", "restart", "deployment/kvroute")

        def said() -> bool:
            logs = release.logs()
            return "403" in logs or "forbidden" in logs

        until(said, 120, "a log line on the right that lacks", every_s=1)
    finally:
        role["metadata"] = {"name": "kvroute", "labels": role["metadata"]["labels"]}
        release.apply(role)
    release.kubectl("rollout", "status", "deployment/kvroute", "--timeout=180s")
    release.wait_for_workers(2)


def test_service_accounts_are_callers(cluster: Cluster) -> None:
    """A key file with `accounts`: tokens are verified by the API server's own keys."""
    release = Release(cluster, "accounts")
    caller = "system:serviceaccount:accounts:caller"
    keys = {
        "identities": [
            {
                "name": "caller",
                "rights": ["observe"],
                "accounts": [{"issuer": ISSUER, "subject": caller}],
            }
        ],
        "issuers": [
            {
                "issuer": ISSUER,
                "audience": "kvroute",
                "jwks": "https://kubernetes.default.svc/openid/v1/jwks",
                "ca_file": "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
                "token_file": "/var/run/secrets/kubernetes.io/serviceaccount/token",
            }
        ],
    }
    of = {"apiVersion": "v1", "metadata": {"name": "my-keys"}}
    release.apply(
        {**of, "kind": "Secret", "stringData": {"keys.yaml": yaml.safe_dump(keys)}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "caller"}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "stranger"}},
    )
    release.install(
        {
            "keys": {"existingSecret": "my-keys", "accounts": True},
            "config": {"ready_timeout_s": 1},
            "networkPolicy": {"enabled": True},
        }
    )

    def call(account: str, audience: str = "kvroute") -> str:
        token = cluster.folder / "account-token"
        token.write_text(
            release.kubectl("create", "token", account, f"--audience={audience}").strip()
        )
        ca = cluster.folder / "ca-accounts.crt"
        ca.write_text(release.secret("kvroute-tls", "ca.crt"))
        ran = cluster.run(
            *("kvroute", "workers", "--target", release.service(50051), "--tls-ca", str(ca)),
            *("--tls-name", "kvroute.accounts.svc", "--token-file", str(token)),
            check=False,
        )
        return ran.stdout + ran.stderr

    until(lambda: "knows no worker" in call("caller"), 60, "the account is taken", every_s=1)
    assert "UNAUTHENTICATED" in call("stranger")
    assert "UNAUTHENTICATED" in call("caller", "another")
    release.uninstall()
    release.end()
