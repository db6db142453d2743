"""The conformance suite of the Gateway API Inference Extension, with kvroute's picker as EPP."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.images import KVROUTE
from tests.gateways.binaries import BY_NAME, MODULES, SUITE
from tests.gateways.stage import Stage

SUITE_S = 1500
INFRA = "inference-conformance-infra"
IDLE: tuple[dict[str, Any], ...] = (
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": INFRA}},
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "idle", "namespace": INFRA},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "idle", "image": KVROUTE, "command": ["sleep", "infinity"]}],
        },
    },
)
"""The suite waits for a pod in the namespace of its Gateways, where Envoy Gateway puts none."""
FAILS = {
    "istio": {
        # The picker is asked by a filter of the route, and a route has one: with two pools in a
        # rule it is the last one's, whose picker can't pick the other pool's pods.
        "GatewayWeightedAcrossTwoInferencePools",
    },
    "envoy-ai-gateway": {
        # Nothing says in the answer which endpoint served.
        "GatewayDestinationEndpointServed",
        # A rule with two pools is answered with 404.
        "GatewayWeightedAcrossTwoInferencePools",
        # Pods are called in HTTP/1.1 alone; and the endpoint that served, as above.
        "InferencePoolAppProtocol",
        # The reason is NotAccepted, where EndpointPickerRefMissing is wanted.
        "InferencePoolMissingEPPRef",
    },
}
"""Tests that fail by what the gateway does, whatever the picker is."""
WAITS_S = {
    "maxTimeToConsistency": 45,
    "httpRouteMustHaveCondition": 45,
    "routeMustHaveParents": 45,
    "gatewayMustHaveAddress": 60,
    "gatewayMustHaveCondition": 60,
    "gatewayStatusMustHaveListeners": 60,
    "gatewayListenersMustHaveConditions": 60,
    "namespacesMustBeReady": 180,
    "defaultTestTimeout": 120,
    "createTimeout": 60,
    "deleteTimeout": 10,
    "getTimeout": 10,
    "requestTimeout": 10,
    "gwcMustBeAccepted": 60,
    "latestObservedGenerationSet": 60,
    "manifestFetchTimeout": 10,
    "defaultPollInterval": 1,
}
"""The suite waits 300 s for most of these, and some are to fail."""


@pytest.mark.usefixtures("epp")
def test_no_test_fails_by_the_picker(stage: Stage, tmp_path: Path) -> None:
    name = stage.gateway.name
    if not stage.gateway.conforms:
        pytest.skip(f"{name} takes no InferencePool")
    cluster = stage.cluster
    options = tmp_path / "options.yaml"
    waits: dict[str, int] = {each: seconds * 10**9 for each, seconds in WAITS_S.items()}
    options.write_text(json.dumps({"timeoutConfig": {**waits, "requiredConsecutiveSuccesses": 3}}))
    cluster.apply(*IDLE)
    ran = cluster.run(
        *(str(BY_NAME["inference-conformance"].path), "-test.v", "-test.timeout", f"{SUITE_S}s"),
        *("-gateway-class", stage.gateway.conforms, "-conformance-options-file", str(options)),
        *("-organization", "kvroute", "-project", "kvroute", "-contact", "@kvroute"),
        *("-url", "https://kvroute.invalid", "-version", MODULES[SUITE]),
        timeout=SUITE_S + 60,
        check=False,
    )
    (tmp_path / "suite.log").write_text(ran.stdout + ran.stderr)
    found = re.findall(
        r"^    --- (PASS|FAIL|SKIP): TestConformance/(\w+) ", ran.stdout, re.MULTILINE
    )
    results = {test: result for result, test in found}
    passed = [test for test, result in results.items() if result == "PASS"]
    sys.stdout.write(f"{name}: {len(passed)} of {len(results)} conformance tests pass\n")
    assert len(results) >= 14, ran.stdout[-3000:]
    assert {test for test, result in results.items() if result != "PASS"} == FAILS[name]
