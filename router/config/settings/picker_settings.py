"""The settings of an endpoint picker for Envoy: frozen, with bounds."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings


class PickerSettings(Settings, frozen=True):
    """The endpoint picker, which Envoy calls by ext_proc."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of the endpoint picker, which Envoy calls; port 0 picks"
            " a free port, empty: no picker",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
    tls: Annotated[
        Literal["optional", "server", "mutual"],
        Meta(
            description="connections that are accepted. optional: those without TLS, and with TLS"
            " if tls.certificate_file is set; server: only those with TLS; mutual: only those with"
            " TLS and a certificate signed by a CA of tls.client_ca_file"
        ),
    ] = "optional"
    fallbacks: Annotated[
        int,
        Meta(
            ge=0,
            le=3,
            description="most further endpoints that the picker names for Envoy to try when the"
            " picked one fails; 0 for proxies that take only one endpoint",
        ),
    ] = 0
    pairs: Annotated[
        Literal["never", "llm-d"],
        Meta(
            description="whether requests get pairs of workers. llm-d: if the model has prefill"
            " workers, the header x-prefiller-host-port has the address of one, for llm-d's"
            " sidecar beside the decode worker"
        ),
    ] = "never"
    objectives: Annotated[
        Mapping[str, int],
        Meta(
            description="priority of each objective, by its name in the header"
            " x-gateway-inference-objective or x-llm-d-inference-objective; requests without a"
            " listed objective have their body's, or 0; those with a higher priority go first"
        ),
    ] = {}
    unobserved_s: Annotated[
        Seconds,
        Meta(
            description="seconds for which a request counts as running when Envoy shows the"
            " picker nothing of its answer"
        ),
    ] = 20.0


class PickerProcessSettings(PickerSettings, frozen=True):
    """Settings of a picker in a process of its own."""

    listen: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port of the endpoint picker for Envoy; port 0 picks a free one",
        ),
    ] = "127.0.0.1:9002"
