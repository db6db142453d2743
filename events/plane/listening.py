"""The NATS subscriptions of one owner, such as a relay.

Law: a callback that raises costs its message, and a subscription that can't be made is retried;
both are counted and shown under the supervisor of the worker concerned.
"""

from contextlib import AsyncExitStack

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from events.plane.broker import Broker, OnMessage
from events.plane.supervisor import Supervisor


class Listening:
    """Subscriptions that are supervised, and end together."""

    def __init__(self) -> None:
        self._subscriptions: list[tuple[str, Broker, Subscription]] = []
        """(name of the work, broker, subscription)"""

    async def listen(
        self,
        broker: Broker,
        subject: str,
        listener: OnMessage,
        work: str,
        supervisor: Supervisor,
    ) -> None:
        """Calls the listener with each message on a subject. work: the name by which the supervisor
        counts its failures."""

        async def guarded(message: Msg) -> None:
            try:
                await listener(message)
            except Exception as error:  # as the law says
                supervisor.failed(work, error)

        async def subscribe() -> None:
            subscription = await broker.subscribe(subject, guarded)
            self._subscriptions.append((work, broker, subscription))

        try:
            await subscribe()
        except Exception as error:  # as the law says: in the background from now on
            supervisor.failed(work, error)
            _ = supervisor.keep(subscribe, work)

    def unread(self, work: str) -> int:
        """Messages that have come for this work and wait for its listener."""
        return sum(
            subscription.pending_msgs
            for name, _, subscription in self._subscriptions
            if name == work
        )

    async def close(self) -> None:
        """Ends all subscriptions; raises the first error after the last of them."""
        async with AsyncExitStack() as stack:
            for _, broker, subscription in self._subscriptions:
                stack.push_async_callback(broker.unsubscribe, subscription)
