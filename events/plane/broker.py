"""The connection to NATS: reconnects for ever, says when it is gone, counts what is not sent.

Law: once connected, nothing that a connection or its loss makes nats-py raise leaves `publish`,
`request`, `unsubscribe` or `close`: each of them fails as it says, and is counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from ssl import SSLContext, create_default_context

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.plane.nats_client import NatsClient, OnRaw
from events.plane.settings import NatsSettings

PENDING_MESSAGES_MAX = 64 * 1024
PENDING_BYTES_MAX = 64 * 1024 * 1024
"""Of a subscription: a few seconds of work. What waits longer is too old to be worth keeping."""
LOSS_S = 1.0
"""Between two times that listeners are told of lost messages. Each stream finds out by its numbers
what it lost; this is for messages that have none."""
LISTENER_MESSAGES = 32
"""That a listener is handed before others have their turn on the event loop."""
FAILURE_S = 10.0
"""Between two log lines about a listener that raises; each time is counted."""
_RECONNECT_WAIT_S = 1
_CONNECT_S = 2
_FLUSH_S = 1.0
_CLOSE_S = 2.0
_SCHEMES = ("nats", "tls", "ws", "wss")

log = logging.getLogger("kvroute.broker")

OnConnection = Callable[[bool], None]
OnMessage = Callable[[Msg], Awaitable[None]]


class Broker:
    """One NATS connection."""

    def __init__(self, settings: NatsSettings, url: str, name: str) -> None:
        self.counts: Counter[str] = Counter()
        """What went wrong: not_connected, slow_consumer, error, listener_failed"""
        self._settings = settings
        self._url = url
        self._name = name
        self._client = NatsClient()
        self._listeners: list[OnConnection] = []
        self._complained = ""
        self._loss_told_at_s = -LOSS_S
        self._failure_logged_at_s = -FAILURE_S
        self._closing = False

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def unreadable(self) -> int:
        """Messages that were dropped since their subject or headers could not be read."""
        return self._client.unreadable.total()

    def on_connection(self, listener: OnConnection) -> None:
        """Calls the listener with every change of the connection, False also for lost messages."""
        self._listeners.append(listener)

    async def connect(self) -> None:
        """Returns with the first connection; waits for a broker as long as it takes."""
        settings = self._settings
        await self._client.connect(
            servers=[self._url],
            name=self._name,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_WAIT_S,
            connect_timeout=_CONNECT_S,
            flush_timeout=_FLUSH_S,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            user=settings.user,
            password=settings.password,
            user_credentials=settings.credentials_file,
            nkeys_seed=settings.nkey_seed_file,
            tls=self._tls(),
        )
        self._complained = ""
        log.info("%s: connected to NATS", self._name)
        self._tell(True)

    async def publish(self, subject: str, payload: bytes) -> bool:
        """Sends, or counts and returns False; never waits for a broker that isn't there."""
        if not self._client.is_connected:
            self.counts["not_connected"] += 1
            return False
        try:
            await self._client.publish(subject, payload)
        except Exception as error:  # see the law: nats-py lets through what its transport raises
            self.counts["error"] += 1
            log.warning("could not publish on %s: %r", subject, error)
            return False
        return True

    async def subscribe(self, subject: str, listener: OnMessage) -> Subscription:
        """A plain subscription: every replica hears everything. Returns when the broker has it.

        What the listener raises is counted and logged, and ends nothing: what it is handed was said
        by others.
        """
        handed = 0

        async def hear(message: Msg) -> None:
            nonlocal handed
            handed += 1
            if handed % LISTENER_MESSAGES == 0:
                await asyncio.sleep(0)
            try:
                await listener(message)
            except Exception as error:
                self.listener_failed(subject, error)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self.listener_failed(subject, error)  # it was not us who was cancelled

        subscription = await self._client.subscribe(
            subject,
            cb=hear,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )
        try:
            await self._flushed(subject)
        except BaseException:  # the caller was cancelled, and never learns of the subscription
            await self.unsubscribe(subscription)
            raise
        return subscription

    async def subscribe_raw(self, subject: str, listener: OnRaw) -> None:
        """The same for a listener that is called with (subject, payload) while they are read, and
        does its work later: it has the bounds, and must neither raise nor take long."""
        await self._client.subscribe_raw(subject, listener)
        await self._flushed(subject)

    def listener_failed(self, what: str, error: BaseException) -> None:
        """Counts what a listener raised, and logs some of it."""
        self.counts["listener_failed"] += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._failure_logged_at_s >= FAILURE_S:
            self._failure_logged_at_s = now_s
            log.error("a message on %s was dropped: handling it failed", what, exc_info=error)

    async def _flushed(self, subject: str) -> None:
        try:
            with _cancellation_kept():
                await self._client.flush()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            # The connection went; with the next one the client subscribes again by itself.
            log.warning("subscribing to %s: %r", subject, error)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription; one that is gone with its connection has ended already."""
        try:
            await subscription.unsubscribe()
        except (nats.errors.Error, OSError):
            self.counts["not_connected"] += 1
        except Exception as error:  # see the law
            self.counts["error"] += 1
            log.warning("could not unsubscribe: %r", error)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes | None:
        """The answer; None when nobody answers in time."""
        try:
            with _cancellation_kept():
                return (await self._client.request(subject, payload, timeout=timeout_s)).data
        except (nats.errors.Error, TimeoutError, OSError):
            return None
        except Exception as error:  # see the law
            self.counts["error"] += 1
            log.warning("could not ask on %s: %r", subject, error)
            return None

    async def close(self) -> None:
        """Sends what is still to be sent, if the broker takes it soon."""
        self._closing = True
        try:
            if self._client.is_connected or self._client.is_reconnecting:
                async with asyncio.timeout(_CLOSE_S):
                    await self._client.close()
        except TimeoutError:
            self.counts["error"] += 1
            log.warning("NATS takes nothing: closed without sending the last messages")
        except Exception as error:  # a connection that is gone takes no last messages
            self.counts["error"] += 1
            log.warning(
                "closed the connection to NATS without sending the last messages: %r", error
            )
        finally:
            self._client.abort()  # whatever the client was at: connecting, too

    def check(self) -> None:
        """Tries what nats-py would fail on later, and less clearly.

        Raises OSError or ValueError for credentials, certificates or a URL that can't be used.
        """
        for file in (self._settings.credentials_file, self._settings.nkey_seed_file):
            if file:
                Path(file).read_bytes()
        scheme, separator, _ = self._url.partition("://")
        if not separator or scheme not in _SCHEMES:
            told = _without_secret(self._url)
            raise ValueError(f"{told!r} is no NATS URL: it begins with nats:// or tls://")
        self._tls()

    def _tls(self) -> SSLContext | None:
        settings = self._settings
        if not settings.tls_ca_file and not settings.tls_certificate_file:
            return None
        context = create_default_context(cafile=settings.tls_ca_file)
        if settings.tls_certificate_file:
            context.load_cert_chain(settings.tls_certificate_file, settings.tls_key_file)
        return context

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            # The client has dropped a message and goes on; only this says so. What is lost can't be
            # known, so it counts as a loss of the connection.
            self.counts["slow_consumer"] += 1
            now_s = asyncio.get_running_loop().time()
            if now_s - self._loss_told_at_s >= LOSS_S:
                self._loss_told_at_s = now_s
                log.error("messages come faster than they are read, some are lost: resync")
                self._tell(False)
                self._tell(True)
            return
        self.counts["error"] += 1
        told = f"{type(error).__name__}: {error}".strip(": ")
        if told != self._complained:  # a broker that is away says the same every second
            self._complained = told
            log.warning("NATS at %s: %s", _without_secret(self._url), told)

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        log.warning("%s: connection to NATS lost; reconnecting for ever", self._name)
        self._tell(False)

    async def _on_reconnected(self) -> None:
        self._complained = ""
        log.info("%s: connected to NATS again", self._name)
        self._tell(True)

    def _tell(self, connected: bool) -> None:
        for listener in self._listeners:
            try:
                listener(connected)
            except Exception as error:  # nats-py's reconnecting would end with it
                self.listener_failed("the connection", error)


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raises CancelledError for a cancellation of this task that the body has dropped.

    asyncio.wait_for, which nats-py waits with, drops a cancellation that comes in the same turn of
    the event loop as the result (until Python 3.12): a task so cancelled would run on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


def _without_secret(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url.rpartition("@")[2]
