"""Settings of a relay, made from its pod. Pure.

A pod's annotations say what its engine's pages don't: `kvroute.io/slots: "256"`. Their names are
the keys of a `workers:` entry with dashes, and `port`, `events-port` and `replay-port`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from events.plane.settings import EngineSettings, UnusableEngine, read_engine
from router.cluster.discovery.watched import ANNOTATION, Pod

NUMBERS = ("slots", "total_blocks", "ranks", "first_rank", "block_size", "bootstrap_port")
SWITCHES = ("warm", "loads_loras", "priority_scheduling")
TEXTS = ("engine", "role", "kv_connector", "kv_engine_id", "topic", "model")
PORTS = ("port", "events_port", "replay_port")
ROLES = ("prefill", "decode", "both")
ROLE_LABEL = "llm-d.ai/role"
"""Label of pods that llm-d's charts set; other pods have an annotation."""
PORT_MAX = 65535


class Plan(NamedTuple):
    """Ports of a pod's engine, where the pod's annotations name no others."""

    ports: Sequence[int]
    events_port: int | None
    replay_port: int | None
    copied_labels: Sequence[str] = ()
    """Names of pods' labels that their workers have, too."""


class Endpoint(NamedTuple):
    """One worker of a pod, by the port of its HTTP server."""

    worker_id: str
    address: str
    place: int
    """Index of the worker's port among the pod's ports, from 0 on."""


def endpoints(pod: Pod, plan: Plan) -> list[Endpoint]:
    """The workers of a pod that has an IP address, one for each port; the id of each is the pod's
    name, with the port where there are several. Raises UnusableEngine for an invalid port.
    """
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    own = pod.annotations.get(f"{ANNOTATION}port")
    ports = plan.ports if own is None else [_number("port", own)]
    if own is not None and not 1 <= ports[0] <= PORT_MAX:
        raise UnusableEngine(_named("port"), f"{ports[0]} is no port: they go from 1 to {PORT_MAX}")
    return [
        Endpoint(
            pod.name if len(ports) == 1 else f"{pod.name}-{port}", f"http://{host}:{port}", place
        )
        for place, port in enumerate(ports)
    ]


def settings_of(
    pod: Pod, endpoint: Endpoint, plan: Plan, kind: str, labels: Mapping[str, str]
) -> EngineSettings:
    """The settings of a pod's relay. kind: name of its engine. labels: of its node.

    Raises UnusableEngine for annotations that can't be used.
    """
    said = {
        key.removeprefix(ANNOTATION).replace("-", "_"): value
        for key, value in pod.annotations.items()
    }
    fields: dict[str, object] = {
        "id": endpoint.worker_id,
        "engine": kind,
        "address": endpoint.address,
        "labels": {
            **{name: pod.labels[name] for name in plan.copied_labels if name in pod.labels},
            **labels,
            **({"host": pod.node} if pod.node else {}),
        },
    }
    host = endpoint.address.removeprefix("http://").rpartition(":")[0]
    events = _port(said, "events_port", plan.events_port)
    replay = _port(said, "replay_port", plan.replay_port)
    if events is not None:
        fields["events"] = f"tcp://{host}:{events + endpoint.place}"
        if replay is not None:
            fields["replay"] = f"tcp://{host}:{replay + endpoint.place}"
    if (role := pod.labels.get(ROLE_LABEL, "")) in ROLES:
        fields["role"] = role
    for key, text in said.items():
        fields.update(_read(key, text))
    return read_engine(fields)


def _read(key: str, text: str) -> dict[str, object]:
    """The field of EngineSettings that an annotation sets; raises UnusableEngine."""
    if key in PORTS:
        return {}
    if key in TEXTS:
        return {key: text}
    if key in NUMBERS:
        return {key: _number(key, text)}
    if key in SWITCHES and text in ("true", "false"):
        return {key: text == "true"}
    if key in SWITCHES:
        raise UnusableEngine(_named(key), f"{text[:40]!r} is neither true nor false")
    raise UnusableEngine(_named(key), "kvroute has no such annotation")


def _port(said: Mapping[str, str], key: str, default: int | None) -> int | None:
    text = said.get(key)
    if text is None:
        return default
    return None if text == "none" else _number(key, text)


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise UnusableEngine(_named(key), f"{text[:40]!r} is no number of up to 10 digits")
    return int(text)


def _named(key: str) -> str:
    return f"{ANNOTATION}{key.replace('_', '-')}"[:200]
