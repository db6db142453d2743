"""Objects of other projects against models that were made from those projects' CRDs.

The models ignore fields that they don't know, so an object has to come out of its model unchanged.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

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
NOT_VALIDATED = {"HTTPRoute", "InferencePool"}
"""No package has their schemas; helm/README.md says so."""


def checked(document: Object) -> Object:
    """The object as its model understands it; raises ValueError for what the CRD refuses."""
    model: Any = getattr(import_module(MODULES[document["kind"]]), document["kind"])
    read = model.model_validate(document)
    return read.model_dump(by_alias=True, exclude_unset=True, mode="json")


def custom(render: Callable[..., Rendered]) -> Iterator[Object]:
    for name in EXAMPLES:
        for document in render(**values_of(name)).by_template.values():
            if document["kind"] in NOT_IN_KUBERNETES:
                yield document


def test_every_kind_has_a_schema_or_is_named_without_one(render: Callable[..., Rendered]) -> None:
    assert {document["kind"] for document in custom(render)} == set(MODULES) | NOT_VALIDATED
    assert set(NOT_IN_KUBERNETES) == set(MODULES) | NOT_VALIDATED


@pytest.mark.filterwarnings("ignore")  # of the models' own package
def test_crds_take_every_object_whole(render: Callable[..., Rendered]) -> None:
    for document in custom(render):
        if document["kind"] in MODULES:
            assert checked(document) == document, document["kind"]


@pytest.mark.filterwarnings("ignore")
def test_a_field_that_a_crd_does_not_know_is_noticed(render: Callable[..., Rendered]) -> None:
    (document,) = [one for one in custom(render) if one["kind"] == "ScaledObject"]
    strange = {**document, "spec": {**document["spec"], "minReplicas": 3}}
    assert checked(strange) != strange
    wrong = {**document, "spec": {**document["spec"], "minReplicaCount": "three"}}
    with pytest.raises(ValueError, match="minReplicaCount"):
        checked(wrong)
