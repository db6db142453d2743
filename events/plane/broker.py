"""The connection to NATS: reconnects for ever, reports its loss, counts messages not sent.

Law: no error of a NATS server leaves `connect`; once connected, no error of the connection or its
loss leaves `publish`, `request`, `unsubscribe` or `close`: they fail as documented, and the failure
is counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.plane.nats_check import check_connection, files_of, tls_context, without_secret
from events.plane.nats_client import NatsClient, OnRaw, RawSubscription
from events.plane.permissions import Attempt, refused
from events.plane.settings import NatsSettings

PENDING_MESSAGES_MAX = 64 * 1024
PENDING_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that wait in a subscription: a few seconds of work; older messages are of no use."""
LOSS_S = 1.0
"""Least seconds between two reports of lost messages to listeners. Streams detect a loss by their
numbers; the reports are for messages without numbers."""
LISTENER_MESSAGES = 32
"""Messages that a listener handles in a turn of the event loop."""
FAILURE_S = 10.0
"""Least seconds between two log lines about listeners that raise; each failure is counted."""
_RECONNECT_WAIT_S = 1
_CONNECT_S = 2
_BROKEN_S = 1.0
"""Seconds before the next attempt at a first connection, when nats-py could not read the server."""
_FLUSH_S = 1.0
_CLOSE_S = 2.0
_PROBE_S = 3.0
_OVERLAP_S = 0.05
"""Seconds between the beginning of subscriptions and the end of those that they replace. A server
that gets both at once drops the messages that it is sending to the old subscriptions at that
moment: some 20 of a fast publisher."""

log = logging.getLogger("kvroute.broker")

OnConnection = Callable[[bool], None]
OnMessage = Callable[[Msg], Awaitable[None]]


class Broker:
    """One NATS connection."""

    def __init__(self, settings: NatsSettings, url: str, name: str) -> None:
        self.counts: Counter[str] = Counter()
        """Kind (not_connected, slow_consumer, error, listener_failed) -> failures"""
        self._settings = settings
        self._url = url
        self._name = name
        self._client = self._made_client()
        self._listeners: list[OnConnection] = []
        self._last_warning = ""
        self._loss_reported_at_s = -LOSS_S
        self._failure_logged_at_s = -FAILURE_S
        self._closing = False
        self._probed: set[tuple[bool, str] | None] = set()
        """(publishes, subject) of each attempt that is not refused yet; see `allowed`."""
        self._all_refused = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def unreadable(self) -> int:
        """Messages dropped because their subject or headers could not be read."""
        return self._client.unreadable.total()

    def on_connection(self, listener: OnConnection) -> None:
        """Calls the listener with whether NATS is connected, at each change; lost messages count as
        a change to False and back."""
        self._listeners.append(listener)

    async def connect(self) -> None:
        """Returns once connected; waits for a NATS server without a time limit.

        A server whose bytes can't be read is tried again, like a server that can't be reached.
        """
        while True:
            try:
                with _cancellation_kept():
                    await self._connect()
                break
            except Exception as error:  # see the law: nats-py raises what its parsers raise
                await self._on_error(error)
                self._client.abort()
                self._client = self._made_client()  # the one before holds half of a connection
                await asyncio.sleep(_BROKEN_S)
        self._last_warning = ""
        log.info("%s: connected to NATS", self._name)
        self._notify(True)

    def _made_client(self) -> NatsClient:
        return NatsClient(needs_tls=self._settings.encrypts(self._url))

    async def _connect(self) -> None:
        settings = self._settings
        credentials, seed = files_of(settings)
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
            user_credentials=credentials,
            nkeys_seed=seed,
            tls=tls_context(self._settings),
        )

    async def publish(self, subject: str, payload: bytes) -> bool:
        """Sends a message. Without a connection, or after an error, counts it and returns False:
        never waits for a NATS server that is away."""
        if not self._client.is_connected:
            self.counts["not_connected"] += 1
            return False
        try:
            await self._client.publish(subject, payload)
        except Exception as error:  # see the law: nats-py passes on errors of its transport
            self.counts["error"] += 1
            log.warning("could not publish on %s: %r", subject, error)
            return False
        return True

    async def subscribe(self, subject: str, listener: OnMessage) -> Subscription:
        """Subscribes, without a queue group: every replica gets every message. Returns when the
        NATS server knows the subscription.

        An exception of the listener is counted and logged, and ends nothing.
        """
        handled = 0

        async def handle(message: Msg) -> None:
            nonlocal handled
            handled += 1
            if handled % LISTENER_MESSAGES == 0:
                await asyncio.sleep(0)
            try:
                await listener(message)
            except Exception as error:
                self.listener_failed(subject, error)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self.listener_failed(subject, error)  # the listener's own, not of this task

        subscription = await self._client.subscribe(
            subject,
            cb=handle,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )
        try:
            await self._flushed(subject)
        except BaseException:  # the caller was cancelled, and never learns of the subscription
            await self.unsubscribe(subscription)
            raise
        return subscription

    async def change_raw(
        self, begin: Sequence[str], end: Sequence[RawSubscription], listener: OnRaw
    ) -> list[RawSubscription]:
        """Begins subscriptions, then ends others, without a gap: messages that the server had
        queued for an ended subscription still reach its listener. Returns the begun subscriptions,
        up to the first that fails.

        The listener is called with (subject, payload) of each message while it is read: it bounds
        its own queue, and must not raise or take long.
        """
        begun = []
        for subject in begin:
            try:
                begun.append(await self._client.subscribe_raw(subject, listener))
            except Exception as error:  # see the law
                self.counts["error"] += 1
                log.warning("could not subscribe to %s: %r", subject, error)
                break
        if begin and end:
            await asyncio.sleep(_OVERLAP_S)
        for raw in end:
            await self.unsubscribe(raw.subscription)
        await self._flushed(f"{len(begun)} subjects")  # what was queued before has come
        for raw in end:
            self._client.forget_raw(raw)
        return begun

    def listener_failed(self, what: str, error: BaseException) -> None:
        """Counts a listener's exception; logs it at most every FAILURE_S."""
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
            # The connection ended; the client subscribes again by itself when it reconnects.
            log.warning("subscribed to %s, but the NATS server didn't confirm: %r", subject, error)

    async def round_trip(self, timeout_s: float) -> bool:
        """Sends a PING and waits for the server's answer, which comes behind all messages that it
        has queued; False: no answer within timeout_s. Without a connection, True at once."""
        if not self._client.is_connected:
            return True
        try:
            with _cancellation_kept():
                await self._client.flush(timeout=timeout_s)  # type: ignore[arg-type]
        except TimeoutError:  # nats-py's own is one, too
            return False
        except (nats.errors.Error, OSError):
            return True
        return True

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription; errors are counted, since a lost connection has ended it already."""
        try:
            await subscription.unsubscribe()
        except (nats.errors.Error, OSError):
            self.counts["not_connected"] += 1
        except Exception as error:  # see the law
            self.counts["error"] += 1
            log.warning("could not unsubscribe: %r", error)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes | None:
        """Sends a request; returns the answer's bytes, or None when none comes in timeout_s."""
        try:
            with _cancellation_kept():
                return (await self._client.request(subject, payload, timeout=timeout_s)).data
        except (nats.errors.Error, TimeoutError, OSError):
            return None
        except Exception as error:  # see the law
            self.counts["error"] += 1
            log.warning("could not send a request on %s: %r", subject, error)
            return None

    async def allowed(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Makes the attempts; returns those that the NATS server does not refuse in _PROBE_S.

        Subscriptions end at once, and refusals don't count as errors. If the attempts can't be
        made, logs why and returns none.
        """
        # nats-py gives errors in lower case.
        self._probed = {(attempt.publishes, attempt.subject.lower()) for attempt in attempts}
        subscriptions = []
        self._all_refused.clear()
        try:
            async with asyncio.timeout(_FLUSH_S):
                for attempt in attempts:
                    if attempt.publishes:
                        await self._client.publish(attempt.subject, b"")
                    else:
                        subscriptions.append(
                            await self._client.subscribe(attempt.subject, cb=_ignore)
                        )
                await self._client.flush()
            with suppress(TimeoutError):  # of what is allowed there is no sign
                async with asyncio.timeout(_PROBE_S):
                    await self._all_refused.wait()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            log.warning("could not see what the NATS credentials allow: %r", error)
            return []
        finally:
            left, self._probed = self._probed, set()
            for subscription in subscriptions:
                await self.unsubscribe(subscription)
        return [
            attempt for attempt in attempts if (attempt.publishes, attempt.subject.lower()) in left
        ]

    async def close(self) -> None:
        """Closes the connection; waits at most 2 s for the NATS server to take unsent messages."""
        self._closing = True
        try:
            if self._client.is_connected or self._client.is_reconnecting:
                async with asyncio.timeout(_CLOSE_S):
                    await self._client.close()
        except TimeoutError:
            self.counts["error"] += 1
            log.warning("the NATS server took no messages in time: closed without sending the last")
        except Exception as error:  # a lost connection takes no last messages
            self.counts["error"] += 1
            log.warning(
                "closed the connection to NATS without sending the last messages: %r", error
            )
        finally:
            self._client.abort()  # in any state of the client, also while it connects

    def check(self) -> bool:
        """Checks the settings before connecting: see nats_check.check_connection."""
        return check_connection(self._settings, self._url)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            # The client has dropped an unknown message and goes on, so this counts as a loss of the
            # connection.
            self.counts["slow_consumer"] += 1
            now_s = asyncio.get_running_loop().time()
            if now_s - self._loss_reported_at_s >= LOSS_S:
                self._loss_reported_at_s = now_s
                log.error(
                    "NATS messages come faster than this process reads them; some were lost, and"
                    " their streams recover"
                )
                self._notify(False)
                self._notify(True)
            return
        if (refusal := refused(str(error))) in self._probed:
            self._probed.discard(refusal)
            if not self._probed:
                self._all_refused.set()
            return
        self.counts["error"] += 1
        text = f"{type(error).__name__}: {error}".strip(": ")
        if text != self._last_warning:  # while a broker is away, the same error comes every second
            self._last_warning = text
            log.warning("NATS at %s: %s", without_secret(self._url), text)

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        log.warning("%s: connection to NATS lost; reconnecting for ever", self._name)
        self._notify(False)

    async def _on_reconnected(self) -> None:
        self._last_warning = ""
        log.info("%s: connected to NATS again", self._name)
        self._notify(True)

    def _notify(self, connected: bool) -> None:
        for listener in self._listeners:
            try:
                listener(connected)
            except Exception as error:  # it would end nats-py's reconnecting
                self.listener_failed("the connection", error)


async def _ignore(_message: Msg) -> None:
    """Callback of a subscription that ends at once."""


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
