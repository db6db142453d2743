"""Objects of other projects against their CRDs, or models that were made from those.

The models ignore fields that they don't know, so an object has to come out of its model unchanged.
The CRDs in crds/ refuse such fields.
"""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.helm.package import NOT_IN_KUBERNETES
from tests.helm.rendered import EXAMPLES, Object, Rendered, values_of

MODULES = {
    "Certificate": "cloudcoil.models.cert_manager.v1",
    "DestinationRule": "cloudcoil.models.istio.networking.v1",
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
}
CRDS = {path.stem: path for path in (Path(__file__).parent / "crds").glob("*.json")}


def checked(document: Object) -> Object:
    """The object as its model understands it; raises ValueError for what the CRD refuses."""
    if path := CRDS.get(document["kind"]):
        jsonschema.validate(document, json.loads(path.read_text()))
        return document
    model: Any = getattr(import_module(MODULES[document["kind"]]), document["kind"])
    read = model.model_validate(document)
    return read.model_dump(by_alias=True, exclude_unset=True, mode="json")


def custom(render: Callable[..., Rendered]) -> Iterator[Object]:
    for name in EXAMPLES:
        for document in render(**values_of(name)).by_template.values():
            if document["kind"] in NOT_IN_KUBERNETES:
                yield document


def test_every_kind_has_a_schema(render: Callable[..., Rendered]) -> None:
    assert {document["kind"] for document in custom(render)} == set(MODULES) | set(CRDS)
    assert set(NOT_IN_KUBERNETES) == set(MODULES) | set(CRDS)


@pytest.mark.filterwarnings("ignore")  # of the models' own package
def test_crds_take_every_object_whole(render: Callable[..., Rendered]) -> None:
    for document in custom(render):
        assert checked(document) == document, document["kind"]


@pytest.mark.filterwarnings("ignore")
def test_a_field_that_a_crd_does_not_know_is_noticed(render: Callable[..., Rendered]) -> None:
    (document,) = [one for one in custom(render) if one["kind"] == "ScaledObject"]
    strange = {**document, "spec": {**document["spec"], "minReplicas": 3}}
    assert checked(strange) != strange
    wrong = {**document, "spec": {**document["spec"], "minReplicaCount": "three"}}
    with pytest.raises(ValueError, match="minReplicaCount"):
        checked(wrong)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("HTTPRoute", {"rule": []}),
        ("HTTPRoute", {"parentRefs": "gateway"}),
        ("HTTPRoute", {"rules": [{"backendRefs": [{"name": "pool", "port": 0}]}]}),
        ("InferencePool", {"targetPorts": [{"number": 70_000}]}),
        ("InferencePool", {"endpointPickerRef": {"name": "p", "failureMode": "FailSoft"}}),
        ("InferencePool", {"extensionRef": {"name": "p"}}),
    ],
)
def test_what_a_crd_refuses_is_refused(
    render: Callable[..., Rendered], kind: str, change: dict[str, Any]
) -> None:
    document = next(one for one in custom(render) if one["kind"] == kind)
    assert checked(document) == document
    with pytest.raises(jsonschema.ValidationError):
        checked({**document, "spec": {**document["spec"], **change}})
