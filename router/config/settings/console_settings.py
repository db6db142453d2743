"""Settings of the console in the browser."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Seconds, Settings


class ConsoleSettings(Settings, frozen=True):
    """The console, at /console/ on the port of the metrics."""

    enabled: Annotated[
        bool,
        Meta(
            description="serve the console on the port of the metrics; without keys only where"
            " metrics.listen is loopback"
        ),
    ] = True
    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="names by which browsers reach it, beside those of loopback, without"
            " ports; none, and callers need keys: any"
        ),
    ] = ()
    session_s: Annotated[
        Seconds, Meta(description="seconds after which a browser has to sign in again")
    ] = 43_200.0
