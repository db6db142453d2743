"""Addresses to listen on, and which of them only this machine's users can reach. Pure."""

import ipaddress
import re

from router.config.keys import ConfigError

UNIX = ("unix:", "unix-abstract:")
_PORT = re.compile("[0-9]{1,5}").fullmatch


def is_private(listen: str) -> bool:
    """Whether an address to listen on is loopback or a unix socket. A name other than localhost is
    not: it may resolve to any address.
    """
    if listen.startswith(UNIX):
        return True
    for scheme in ("ipv4:", "ipv6:", "dns:///", "dns:"):
        listen = listen.removeprefix(scheme)
    return is_loopback(listen.rpartition(":")[0].removeprefix("[").removesuffix("]"))


def is_loopback(host: str) -> bool:
    """Whether a host, an IP address or a name, is loopback; empty, every address, is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(listen: str, *, key: str, guarded: bool, switch: str, allowed: bool) -> bool:
    """Whether callers without keys are served on an address that is not loopback; raises
    ConfigError where they would be, and the switch is off.

    key: the configuration key of `listen`. guarded: whether callers need keys. switch, allowed: the
    key that allows this, and its value.
    """
    if guarded or is_private(listen):
        return False
    if not allowed:
        raise ConfigError(
            f"{listen} is not loopback, and callers need no keys: set keys.file or"
            f" tls.client_ca_file, or {switch} to serve all that reach it - at `$.{key}`"
        )
    return True


def split_address(address: str, key: str = "") -> tuple[str, int]:
    """Splits host:port, or [v6]:port; raises ConfigError. key: the address's key in the
    configuration.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not _PORT(port) or int(port) > 65535:
        at = f" - at `$.{key}`" if key else ""
        raise ConfigError(f"{address!r} is no address: write host:port, a port up to 65535{at}")
    return host.removeprefix("[").removesuffix("]"), int(port)
