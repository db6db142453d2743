"""Checks of the Host and Origin headers of a browser's request. Pure.

A page of another site can send a browser here, and a name of that site can be made to resolve to
this address (DNS rebinding): the headers show both.
"""

from collections.abc import Collection, Mapping

from router.net.keys.exposure import is_loopback


def host_of(header: str) -> str:
    """The host of a Host header, without its port, in lower case; empty: malformed."""
    if header.startswith("["):
        host, bracket, port = header[1:].partition("]")
        if not bracket or (port and not _is_port(port)):
            return ""
        return host.lower()
    host, colon, port = header.partition(":")
    return "" if colon and not _is_port(f":{port}") else host.lower()


def host_fits(header: str, hosts: Collection[str], *, guarded: bool) -> bool:
    """Whether a request's Host header names this router.

    hosts: names beside those of loopback. guarded: whether callers need keys; then, without
    `hosts`, any name is accepted, since a name of another site has no cookie of this router.
    """
    host = host_of(header)
    if not host:
        return False
    return is_loopback(host) or host in hosts or (guarded and not hosts)


def origin_fits(headers: Mapping[str, str], scheme: str, *, needed: bool) -> bool:
    """Whether a request comes from the console's own page. needed: whether a request without an
    Origin is refused.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = headers.get("Origin")
    if origin is None:
        return not needed
    # A proxy may take TLS off, but none puts it on: https pages call http here.
    host = headers.get("Host", "")
    return origin.lower() in {f"{scheme}://{host}".lower(), f"https://{host}".lower()}


def _is_port(text: str) -> bool:
    return text[:1] == ":" and text[1:].isdigit() and int(text[1:]) <= 65535
