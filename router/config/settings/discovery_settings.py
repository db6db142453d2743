"""Settings of discovery: engines that the router finds by itself, instead of `workers:`."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Port, Settings

DNS_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
NODE_LABEL = r"^[A-Za-z0-9./_-]{0,317}$"


class KubernetesSettings(Settings, frozen=True):
    """Pods of engines, watched at Kubernetes' API. The router runs a relay for each."""

    enabled: Annotated[
        bool,
        Meta(
            description="watch the engines' pods in Kubernetes, and run a relay for each that"
            " becomes ready",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = False
    namespace: Annotated[
        str,
        Meta(
            pattern=DNS_NAME,
            description="namespace of the engines' pods; empty: the namespace of this router's pod",
        ),
    ] = ""
    selector: Annotated[
        str,
        Meta(
            max_length=4096,
            description="label selector of the engines' pods, such as app=vllm",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
    pool: Annotated[
        str,
        Meta(
            pattern=DNS_NAME,
            description="name of the InferencePool whose selector and targetPorts replace"
            " `selector` and `ports`; the router needs the right to get InferencePools",
        ),
    ] = ""
    ports: Annotated[
        tuple[Port, ...],
        Meta(
            min_length=1,
            max_length=8,
            description="HTTP ports of an engine's pod; with several ports, each is one"
            " data-parallel rank and counts as a worker",
        ),
    ] = (8000,)
    events_port: Annotated[
        Port | None,
        Meta(
            description="port of an engine's event publisher; of several `ports`, the worker at the"
            " n-th (from 0) publishes on events_port + n; none: engines publish no KV events"
        ),
    ] = 5557
    replay_port: Annotated[
        Port | None,
        Meta(description="port of an engine's replay socket; none: engines have no replay socket"),
    ] = 5558
    rack_label: Annotated[
        str,
        Meta(
            pattern=NODE_LABEL,
            description="label of nodes that names the rack, such as topology.kubernetes.io/rack;"
            " if set, zone and rack of each worker are read from its node, which needs the right"
            " to get nodes; empty: neither is read",
        ),
    ] = ""
    api: Annotated[
        str | None,
        Meta(
            description="URL of Kubernetes' API; default: the cluster's, by KUBERNETES_SERVICE_HOST"
            " and KUBERNETES_SERVICE_PORT"
        ),
    ] = None


class DiscoverySettings(Settings, frozen=True):
    """Engines that the router finds by itself."""

    kubernetes: KubernetesSettings = KubernetesSettings()
