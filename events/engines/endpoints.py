"""Checks endpoints of configurations and callers, and masks them for texts. Pure.

An unusable endpoint is refused where it is given (configuration, RegisterWorker), because ZMQ and
aiohttp report it at its first use only.

Law: a password never leaves through `masked`.
"""

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import urlsplit

PORT_MAX = 65535
HOST_CHARS_MAX = 253
"""Characters of a DNS name: RFC 1035."""
LABEL_CHARS_MAX = 63
IPC_BYTES_MAX = 107
"""Bytes of a Unix socket's path on Linux, without its last zero byte."""

_CONTROL = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029]")
_OUT_OF_RANGE = re.compile(r"[0-9]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CREDENTIALS = re.compile(r"://\S*@")
_BARE_CREDENTIALS = re.compile(r"^\S*@")


def zmq_error(endpoint: str, *, ranks: int = 1, bind: bool = False) -> str:
    """Why ZMQ can't use an endpoint, as a sentence; empty: it can.

    ranks: rank r of them is at port + r. bind: whether the endpoint is bound instead of connected.
    """
    if control := _CONTROL.search(endpoint):
        return f"{_shown(endpoint)} has the character {control[0]!r} in it"
    scheme, separator, rest = endpoint.partition("://")
    if separator and scheme == "ipc":
        return _ipc_error(endpoint, rest, ranks)
    if not separator or scheme != "tcp":
        return f"{_shown(endpoint)} is no ZMQ endpoint of the form tcp://host:port or ipc://path"
    if ";" in rest:
        return f"{_shown(endpoint)}: a source address (before the semicolon) is not supported"
    host, separator, port = rest.rpartition(":")
    if not separator or not _is_port(port):
        return f"{_shown(endpoint)} has no port from 1 to {PORT_MAX} at its end (tcp://host:port)"
    if int(port) + ranks - 1 > PORT_MAX:
        return (
            f"{_shown(endpoint)}: the port of rank {ranks - 1} would be {int(port) + ranks - 1},"
            f" above {PORT_MAX}"
        )
    if host == "*":
        return (
            "" if bind else f"{_shown(endpoint)}: * can't be connected to; name the engine's host"
        )
    if error := _host_error(host):
        return f"{_shown(endpoint)}: {error}"
    return ""


def http_error(base: str) -> str:
    """Why a URL can't be the base of an engine's HTTP pages, as a sentence; empty: it can."""
    if control := _CONTROL.search(base):
        return f"{_shown(base)} has the character {control[0]!r} in it"
    if "://" not in base:
        whole = f"http://{base}"
        remedy = "" if http_error(whole) else f": write {_shown(whole)}"
        return f"{_shown(base)} has no scheme (http:// or https://){remedy}"
    try:
        parts = urlsplit(base)
        host, _, port = parts.netloc.rpartition("@")[2].rpartition(":")
        if _OUT_OF_RANGE.fullmatch(port) and not _is_port(port):
            return f"{_shown(base)} has the port {port[:20]}, where 1 to {PORT_MAX} are possible"
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:  # its text may have part of a password
        return f"{_shown(base)} has brackets without an IPv6 address, or a port that is no number"
    if parts.scheme not in ("http", "https") or not host:
        return f"{_shown(base)} is no URL of the form http://host:port or https://host:port"
    if parts.query or parts.fragment:
        return f"{_shown(base)} has a query or a fragment, which the base of a URL can't have"
    if error := _host_error(f"[{host}]" if ":" in host else host):
        return f"{_shown(base)}: {error}"
    return ""


def address_error(address: str, *, pages: bool) -> str:
    """Why clients can't send requests to an engine's address, as a sentence; empty: they can.

    pages: whether the engine's HTTP pages are elsewhere, so that the address may have any scheme.
    """
    scheme, separator, _ = address.partition("://")
    if pages and separator and scheme.lower() not in ("http", "https"):
        return ""
    return http_error(address)


def same_place(endpoint: str) -> str:
    """An endpoint in one spelling, so that two spellings of the same socket are equal."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return endpoint
    if host in ("localhost", "::1"):
        host = "127.0.0.1"
    if port is None:
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host.removesuffix('.')}:{port}{parts.path.rstrip('/')}"


def rank_endpoint(endpoint: str, rank: int) -> str:
    """A rank's endpoint: TCP port + rank, as vLLM and SGLang publish. Rank 0's is the base itself.

    Raises ValueError for a rank above 0 of an endpoint without a port.
    """
    if not rank:
        return endpoint
    base, separator, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not separator or not port.isdigit():
        raise ValueError(f"{_shown(endpoint)}: only tcp endpoints with a port serve several ranks")
    return f"{base}:{int(port) + rank}"


def is_ipv6(endpoint: str) -> bool:
    """Whether a ZMQ endpoint has an IPv6 address, which a socket accepts only with an option."""
    return endpoint.startswith("tcp://") and "[" in endpoint


def masked(text: str) -> str:
    """A text with *** for the user names and passwords of its URLs.

    More than those is masked if an @ comes after the host, since a password may contain anything.
    """
    return _CREDENTIALS.sub("://***@", text)


def _ipc_error(endpoint: str, path: str, ranks: int) -> str:
    if not path:
        return f"{_shown(endpoint)} names no path (ipc://path)"
    if len(path.encode("utf-8", "surrogatepass")) > IPC_BYTES_MAX:
        return f"{_shown(endpoint)}: a Unix socket's path has {IPC_BYTES_MAX} bytes at most"
    if ranks > 1:
        return f"{_shown(endpoint)}: only tcp endpoints with a port serve several ranks"
    return ""


def _host_error(host: str) -> str:
    """Why a host can't be used; empty: it can. host: a name, an IPv4 address, or an IPv6 address in
    brackets."""
    if host.startswith("[") or ":" in host:
        if not (host.startswith("[") and host.endswith("]")):
            return "an IPv6 address must stand in brackets"
        try:
            IPv6Address(host[1:-1])
        except AddressValueError:
            return f"{_shown(host)} is no IPv6 address"
        return ""
    if not host.isascii():
        return "a host name with other than ASCII characters must be in Punycode (xn--...)"
    labels = host.removesuffix(".").split(".")
    if len(host) > HOST_CHARS_MAX or not all(0 < len(label) <= LABEL_CHARS_MAX for label in labels):
        return (
            f"the host is no name of at most {HOST_CHARS_MAX} characters whose labels have 1 to"
            f" {LABEL_CHARS_MAX}"
        )
    if not _NAME.fullmatch(host):
        return f"the host {_shown(host)} has characters that no host name has"
    if all(label.isdigit() for label in labels):
        try:
            IPv4Address(host)
        except AddressValueError:
            return f"{_shown(host)} is no IPv4 address"
    return ""


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= PORT_MAX


def _shown(endpoint: str) -> str:
    """An endpoint for a sentence: without a password, and cut to 200 characters."""
    text = masked(endpoint) if "://" in endpoint else _BARE_CREDENTIALS.sub("***@", endpoint)
    return repr(text[:200])
