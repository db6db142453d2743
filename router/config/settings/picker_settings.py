"""The settings of an endpoint picker for Envoy: frozen, with bounds."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings


class PickerSettings(Settings, frozen=True):
    """The endpoint picker that Envoy asks by ext_proc."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of the endpoint picker for Envoy; port 0 picks a free one,"
            " empty: none",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
    plain: Annotated[
        bool,
        Meta(
            description="take connections without TLS; those with TLS come on the same port, if"
            " tls.certificate_file is set"
        ),
    ] = True
    mutual_tls: Annotated[
        bool,
        Meta(
            description="take only connections with a certificate of tls.client_ca_file; set plain"
            " to false beside it"
        ),
    ] = False
    route_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a router's pick, its queue included")
    ] = 30.0
    body_mib_max: Annotated[
        int, Meta(ge=1, le=1024, description="largest body that is read, in MiB; others go by load")
    ] = 64
    bodies_mib_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="bodies that wait for a pick or go back after it, of all requests, in MiB;"
            " others go by load",
        ),
    ] = 1024
    fallbacks: Annotated[
        int,
        Meta(
            ge=0,
            le=3,
            description="endpoints named after the pick for Envoy to try next; some gateways take"
            " one endpoint only",
        ),
    ] = 0
    pairs: Annotated[
        Literal["never", "llm-d"],
        Meta(
            description="llm-d: requests of fleets with prefill workers get one in the header"
            " x-prefiller-host-port, for llm-d's routing sidecar beside the decode worker"
        ),
    ] = "never"
    priority: Annotated[
        Literal["higher", "lower"],
        Meta(description="whether a higher or a lower `priority` in a body is sooner"),
    ] = "higher"
    objectives: Annotated[
        Mapping[str, int],
        Meta(
            description="priorities by the name in x-gateway-inference-objective or"
            " x-llm-d-inference-objective; higher is sooner"
        ),
    ] = {}
    unobserved_s: Annotated[
        Seconds,
        Meta(
            description="how long a request counts as running whose answer the gateway does not"
            " show"
        ),
    ] = 20.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for open requests at SIGTERM")
    ] = 300.0
    accept_after_stop_s: Annotated[
        Seconds,
        Meta(
            description="how long new requests are taken after SIGTERM, while health says"
            " NOT_SERVING and gateways turn to other pickers"
        ),
    ] = 5.0


class PickerProcessSettings(PickerSettings, frozen=True):
    """Those of a picker in a process of its own."""

    listen: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port of the endpoint picker for Envoy; port 0 picks a free one",
        ),
    ] = "127.0.0.1:9002"
