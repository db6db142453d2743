"""Kubernetes' API over HTTP: get, list and watch, as a service account.

No client library: see docs/decisions.md. Token and CA are read for each request, since the kubelet
renews the token every hour. Redirects are not followed.
"""

import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

import aiohttp

PAGE_BYTES_MAX = 32 << 20
LINE_BYTES_MAX = 4 << 20
"""Bytes of an event's line, at most; an object of etcd has 1.5 MiB by default."""
REQUEST_S = 30.0
CONNECT_S = 5.0
LATE_S = 10.0
"""Seconds after the time of a watch by which the server must have ended it; else it is given up."""
REFUSAL_BYTES = 4096
ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet writes the files of a pod's service account."""


class ApiFailed(Exception):
    """A request to the API failed; the message is a sentence without secrets."""

    def __init__(self, reason: str, status: int | None = None, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.wait_s = wait_s
        """Seconds to wait before the next request, as the server asks for."""


class LineCut(Exception):
    """The connection ended in the middle of a line, or a line is longer than LINE_BYTES_MAX."""


class ServiceAccount:
    """Token, CA and namespace of the pod's service account, in files that the kubelet writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca_changed_s = -1.0
        self._context: ssl.SSLContext | None = None

    def namespace(self) -> str:
        """Namespace of this pod; raises OSError outside of a cluster."""
        return (self._folder / "namespace").read_text(encoding="utf-8").strip()

    def headers(self) -> dict[str, str]:
        """Authorization header with the token; empty: there is no token."""
        try:
            token = (self._folder / "token").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return {}
        return {"Authorization": f"Bearer {token}"}

    def tls(self) -> ssl.SSLContext | bool:
        """TLS context that verifies the API's certificate by ca.crt; True: by the system's CAs."""
        file = self._folder / "ca.crt"
        try:
            changed_s = file.stat().st_mtime
        except FileNotFoundError:
            return True
        if self._context is None or changed_s != self._ca_changed_s:
            self._context = ssl.create_default_context(cafile=str(file))
            self._ca_changed_s = changed_s
        return self._context


class KubernetesApi:
    """Sends requests to one API server."""

    def __init__(self, base: str, account: ServiceAccount) -> None:
        """base: URL of the API server."""
        self._base = base.rstrip("/")
        self._account = account
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, query: Mapping[str, str], what: str) -> bytes:
        """Gets a document. what: verb and resource for errors, such as `list pods`. Raises
        ApiFailed.
        """
        body = bytearray()
        try:
            async with self._request(path, query, REQUEST_S) as response:
                await _check(response, what)
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > PAGE_BYTES_MAX:
                        raise ApiFailed(
                            f"{what}: the answer has more than {PAGE_BYTES_MAX >> 20} MiB"
                        )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiFailed(_why(what, error)) from error
        return bytes(body)

    async def watch(
        self,
        path: str,
        query: Mapping[str, str],
        seconds: float,
        what: str,
        on_open: Callable[[], None],
    ) -> AsyncGenerator[bytes]:
        """Yields the lines of a watch that the server ends after this many seconds.

        on_open: called once the server has accepted the watch, before the first event. Raises
        ApiFailed, and LineCut when the connection ends in the middle of a line.
        """
        rest = bytearray()
        try:
            async with self._request(path, query, seconds + LATE_S) as response:
                await _check(response, what)
                on_open()
                async for part in response.content.iter_any():
                    rest += part
                    *lines, last = rest.split(b"\n") if b"\n" in part else [rest]
                    for line in lines:
                        if line.strip():
                            yield bytes(line)
                    rest = bytearray(last)
                    if len(rest) > LINE_BYTES_MAX:
                        raise LineCut
        except aiohttp.ClientPayloadError:
            raise LineCut from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiFailed(_why(what, error)) from error
        if rest.strip():
            raise LineCut

    def _request(
        self, path: str, query: Mapping[str, str], seconds: float
    ) -> "aiohttp.client._RequestContextManager":
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                headers={"Accept": "application/json", "Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session.get(
            self._base + path,
            params=dict(query),
            headers=self._account.headers(),
            ssl=self._account.tls(),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S),
        )


async def _check(response: aiohttp.ClientResponse, what: str) -> None:
    """Raises ApiFailed for an answer with another status than 200."""
    if response.status == 200:
        return
    message = _message(await response.content.read(REFUSAL_BYTES))
    wait = response.headers.get("Retry-After", "")
    raise ApiFailed(
        _sentence(what, response.status, message),
        response.status,
        float(wait) if wait.isascii() and wait.isdecimal() else 0.0,
    )


def _sentence(what: str, status: int, message: str) -> str:
    said = f": {message}" if message else ""
    if status == 403:
        verb, _, resource = what.partition(" ")
        return (
            f"the service account may not {what} (403): it needs a Role with the verb {verb!r} on"
            f" {resource}{said}"
        )
    if status == 401:
        return f"{what}: Kubernetes does not take the service account's token (401){said}"
    return f"{what}: Kubernetes answers with status {status}{said}"


def _message(body: bytes) -> str:
    """The message of a Status document, or the start of any other answer."""
    text = body.decode("utf-8", "replace")
    _, _, after = text.partition('"message":')
    if after.strip().startswith('"'):
        text = after.strip()[1:].replace('\\"', "'").partition('"')[0]
    return " ".join(text.split())[:200]


def _why(what: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"{what}: Kubernetes does not answer in time"
    return f"{what}: {str(error) or type(error).__name__}"[:300]
