"""Clusters whose pods have IPv6 addresses, alone and beside IPv4."""

import pytest

from tests.cluster import engines
from tests.cluster.cluster import Cluster
from tests.cluster.images import archives
from tests.cluster.load import Load
from tests.cluster.release import Release


@pytest.mark.parametrize("families", [("ipv6",), ("ipv4", "ipv6"), ("ipv6", "ipv4")], ids="-".join)
def test_a_release_serves_on(cluster: Cluster, families: tuple[str, ...]) -> None:
    with Cluster("-".join(families), families=families) as other:
        other.load(*archives(cluster.archives))
        release = Release(other, "served")
        release.apply(engines.deployment("engine", 2))
        release.install(
            engines.found(
                replicaCount=2,
                nats={"server": {"enabled": True}},
                service={"ipFamilyPolicy": "PreferDualStack"},
            )
        )
        workers = release.wait_for_workers(2)
        is_six = families[0] == "ipv6"
        assert all(("[" in one["address"]) == is_six for one in workers)
        release.helm("test", "--logs")
        addresses = release.get("service", "kvroute")["spec"]["clusterIPs"]
        assert len(addresses) == len(families)
        for address in addresses:
            options = release.client(engines.MODEL)
            host = f"[{address}]" if ":" in address else address
            options["url"] = f"https://{host}:8080/v1/chat/completions"
            with Load(other, rate=4, **options) as load:
                release.kubectl("rollout", "restart", "deployment/kvroute")
                release.kubectl("rollout", "status", "deployment/kvroute", "--timeout=180s")
            assert load.failed == []
