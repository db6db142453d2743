"""Settings that are unsafe, and settings with which a router can never work. Pure.

Law: a setting that lets others in, shows secrets or plain text to a network, or leaves a router
without workers for good is in RISKS, and only there: `kvroute check-config` and each process at its
start print its sentence. The defaults have none but the last of these.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from events.plane.nats_check import on_loopback, without_secret
from events.plane.settings import NatsSettings, Settings
from router.config.keys import value_at
from router.net.keys.exposure import is_private
from router.net.keys.networks import networks_of

log = logging.getLogger("kvroute")


class Values:
    """The values of a configuration, by key; None for a key that its process lacks."""

    def __init__(self, config: Settings) -> None:
        self._tree = msgspec.to_builtins(config)
        self.nats: NatsSettings | None = getattr(config, "nats", None)

    def __getitem__(self, key: str) -> Any:
        return value_at(self._tree, tuple(key.split(".")))

    def open(self, *keys: str) -> str:
        """The first of these listening addresses that a network can reach; empty: none."""
        listens = (self[key] for key in keys)
        return next((listen for listen in listens if listen and not is_private(listen)), "")

    @property
    def keyed(self) -> bool:
        """Whether callers need keys."""
        return bool(self["keys.file"] or self["tls.client_ca_file"])

    @property
    def far_nats(self) -> str:
        """URL of the NATS server, if it is not on this machine; else empty."""
        url = self["nats.url"] or ""
        return without_secret(url) if url and not on_loopback(url) else ""


@dataclass(frozen=True, slots=True)
class Risk:
    """A setting that is unsafe with its present value."""

    key: str
    """The configuration key to change."""
    shows: Callable[[Values], Any]
    """Returns whether the setting is unsafe; a text that it returns takes the place of {} in the
    sentence."""
    sentence: str


def warnings_of(config: Settings) -> list[str]:
    """A sentence for each risk of a process's configuration, in the order of the table."""
    values = Values(config)
    return list(_sentences(values))


def log_risks(config: Settings) -> None:
    """Logs a warning for each risk of a process's configuration, at its start."""
    for sentence in warnings_of(config):
        log.warning("%s", sentence)


def _sentences(values: Values) -> Iterator[str]:
    for risk in RISKS:
        if shows := risk.shows(values):
            yield f"{risk.key} {risk.sentence.replace('{}', str(shows))}"


def _grpc_for_all(values: Values) -> str:
    return "" if values.keyed or not values["grpc.any_address"] else values.open("grpc.listen")


def _gateway_for_all(values: Values) -> str:
    allowed = values["gateway.any_address"] and not values.keyed
    return values.open("gateway.listen") if allowed else ""


def _shared_caches(values: Values) -> str:
    shared = values["keys.file"] and values["gateway.salt"] == "client"
    return values.open("gateway.listen") if shared else ""


def _plain(*keys: str) -> Callable[[Values], str]:
    return lambda values: "" if values["tls.certificate_file"] else values.open(*keys)


def _plain_grpc(values: Values) -> str:
    return _plain("grpc.listen")(values) if values.keyed else ""


def _plain_console(values: Values) -> str:
    console = values["console.enabled"] and values.keyed and values["metrics.tls"] == "off"
    return values.open("metrics.listen") if console else ""


def _picks_for_all(values: Values) -> str:
    return "" if values["picker.tls"] == "mutual" else values.open("picker.listen")


def _plain_picks(values: Values) -> str:
    plain = values["picker.tls"] == "optional" or not values["tls.certificate_file"]
    return values.open("picker.listen") if plain else ""


def _plain_nats(values: Values) -> str:
    nats, url = values.nats, values["nats.url"]
    read = nats is not None and nats.allow_plaintext and values.far_nats and not nats.encrypts(url)
    return values.far_nats if read else ""


def _nats_for_all(values: Values) -> str:
    names = ("credentials_file", "user", "tls_certificate_file")
    known = any(values[f"nats.{name}"] for name in names) or "@" in (values["nats.url"] or "")
    return "" if known else values.far_nats


def _wide_network(values: Values) -> str:
    networks = networks_of(values["fleet.register_networks"] or "")
    wide = [each for each in networks if each.prefixlen < (8 if each.version == 4 else 7)]
    return str(wide[0]) if wide else ""


def _unix_for_all(values: Values) -> bool:
    return bool(values["grpc.unix_socket"]) and int(values["grpc.unix_socket_mode"], 8) & 0o002 != 0


def _plain_router(values: Values) -> str:
    if any(values[f"to_router.{name}"] for name in ("tls", "ca_file", "certificate_file")):
        return ""
    targets = [target.strip() for target in (values["router"] or "").split(",")]
    return next((target for target in targets if target and not is_private(target)), "")


def _plain_spans(values: Values) -> str:
    parts = urlsplit(values["tracing.endpoint"] or "")
    host = parts.hostname or ""
    near = host == "localhost" or (host and is_private(f"[{host}]:1"))
    return host if parts.scheme == "http" and not near else ""


def _no_workers(values: Values) -> bool:
    sources = ("workers", "nats.url", "discovery.kubernetes.enabled", "fleet.register_networks")
    return values["discovery"] is not None and not any(values[source] for source in sources)


RISKS: tuple[Risk, ...] = (
    Risk(
        "grpc.any_address",
        _grpc_for_all,
        "is set: all that reach {} may call every method, fleet commands among them, without keys;"
        " set keys.file",
    ),
    Risk(
        "gateway.any_address",
        _gateway_for_all,
        "is set: all that reach {} may use every model, without keys; set keys.file",
    ),
    Risk(
        "tls.certificate_file",
        _plain_grpc,
        "is not set: keys and prompts that come to {} cross the network in plain text",
    ),
    Risk(
        "tls.certificate_file",
        _plain("gateway.listen"),
        "is not set: keys and prompts that come to the gateway at {} cross the network in plain"
        " text, unless something in front of it has TLS",
    ),
    Risk(
        "metrics.tls",
        _plain_console,
        "is off: keys by which people sign in to the console at {} cross the network in plain text",
    ),
    Risk(
        "picker.tls",
        _picks_for_all,
        "is not mutual: all that reach {} may have picks made, without keys",
    ),
    Risk(
        "picker.tls",
        _plain_picks,
        "is optional, or tls.certificate_file is not set: prompts that come to {} cross the"
        " network in plain text",
    ),
    Risk(
        "nats.allow_plaintext",
        _plain_nats,
        "is set: the network can read all that goes to and from {}, credentials and prompts"
        " included",
    ),
    Risk(
        "nats.credentials_file",
        _nats_for_all,
        "is not set, and no other proof of a client: what reaches {} may publish any worker's"
        " facts, and commands to the fleet; `kvroute nats-permissions` prints users",
    ),
    Risk(
        "fleet.register_networks",
        _wide_network,
        "has {}: callers of RegisterWorker may make this router call nearly any address",
    ),
    Risk(
        "grpc.unix_socket_mode",
        _unix_for_all,
        "lets every user of this host call every method, without keys",
    ),
    Risk(
        "gateway.pass_keys",
        lambda values: values["gateway.pass_keys"] and values.keyed,
        "is set: each worker gets the keys by which clients prove themselves to this gateway",
    ),
    Risk(
        "gateway.salt",
        _shared_caches,
        "is client: clients of {} share prefixes with those of other tenants, and can tell what"
        " these have cached; set it to tenant, unless there is a single tenant",
    ),
    Risk(
        "gateway.cors_origins",
        lambda values: (
            values["gateway.listen"] and not values.keyed and "*" in values["gateway.cors_origins"]
        ),
        "has *, and callers need no keys: every page in a browser that reaches the gateway may use"
        " every model",
    ),
    Risk(
        "to_router.tls",
        _plain_router,
        "is off: prompts and the token go to {} in plain text",
    ),
    Risk(
        "tracing.endpoint",
        _plain_spans,
        "has http: spans go to {} in plain text",
    ),
    Risk(
        "decision_log.hashes",
        lambda values: values["decision_log.hashes"] and values["decision_log.file"],
        "is set: a reader of {} can test guesses of prompts",
    ),
    Risk(
        "workers",
        _no_workers,
        "is empty, and so are nats.url, discovery.kubernetes and fleet.register_networks: no worker"
        " can ever appear, and no request is ever served",
    ),
)
