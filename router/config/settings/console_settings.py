"""Settings of the console in the browser."""

from typing import Annotated

from msgspec import Meta

from events.plane.settings import Settings


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
            description="host names, without ports, in the URLs of browsers that use the console;"
            " loopback's are always allowed. Empty: any name if callers need keys, else loopback's"
            " alone"
        ),
    ] = ()
