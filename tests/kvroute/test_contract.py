"""kvroute.v1 has every name of the .proto files, and the client needs nothing of the router's."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import kvroute.v1
from kvroute.client import InvalidRequest, RouteOptions, route_request
from kvroute.client.messages.bodies import PATHS
from kvroute.v1 import RouteRequest, fleet_pb2, prompts_pb2, router_pb2

FLAT_AND_HEAVY = ("indexer", "events", "router", "simulator", "numpy", "msgspec", "xxhash", "nats")


def test_every_message_enum_and_service_of_the_contract_is_exported() -> None:
    names: set[str] = set()
    for module in (router_pb2, fleet_pb2, prompts_pb2):
        file = module.DESCRIPTOR
        names |= {*file.message_types_by_name, *file.enum_types_by_name}
        for service in file.services_by_name:
            names |= {
                f"{service}Stub",
                f"{service}AsyncStub",
                f"{service}Servicer",
                f"add_{service}Servicer_to_server",
            }
    exported = {
        name
        for name, value in vars(kvroute.v1).items()
        if name[0] != "_" and not isinstance(value, ModuleType)
    }
    assert exported == names | {"TYPE_CHECKING"}


def test_the_keywords_of_route_are_those_that_make_its_message() -> None:
    options: dict[str, Any] = dict.fromkeys(RouteOptions.__annotations__)
    assert route_request(**options).WhichOneof("prompt") is None
    with pytest.raises(TypeError, match="unknown options of a route: token_bytes"):
        route_request(**options, token_bytes=b"")  # type: ignore[call-arg]


def test_every_field_of_a_route_request_can_be_asked_for() -> None:
    forms = {"token_bytes"}  # token_ids are always sent as these
    forms |= {"waited_ms"}  # which the client knows by itself
    fields = {field.name for field in RouteRequest.DESCRIPTOR.fields} - forms
    assert fields <= set(RouteOptions.__annotations__)


@pytest.mark.parametrize("name", PATHS)
def test_a_body_is_sent_as_it_is(name: Any) -> None:
    body = b'{"any": \xff}'
    options: RouteOptions = {name: body, "require_tokens": True}
    request = route_request(model="m", request_id="r", **options)
    assert request == RouteRequest(model="m", request_id="r", require_tokens=True, **{name: body})
    with pytest.raises(TypeError, match=f"{name} is a str; bytes or a dict is wanted"):
        route_request(**{name: "{}"})  # type: ignore[misc]
    for second in ({"token_ids": [1]}, {"text": "a"}, {"block_hashes": []}):
        with pytest.raises(InvalidRequest, match="prompt"):
            route_request(model="m", **options, **second)  # type: ignore[misc]


def test_a_text_is_sent_as_utf_8() -> None:
    assert route_request(text="hé").text == "hé"


def test_the_client_imports_neither_the_routers_packages_nor_theirs() -> None:
    program = (
        "import sys, kvroute.client\n"
        f"print([name for name in {FLAT_AND_HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "[]"
