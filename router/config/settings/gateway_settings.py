"""The settings of a gateway: frozen, with bounds."""

from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings

Origin = Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\s,*]+)$")]
"""scheme://host[:port] of web pages, or * for every one."""


class GatewaySettings(Settings, frozen=True):
    """The HTTP face for OpenAI's and Anthropic's clients."""

    listen: Annotated[
        str,
        Meta(
            description="host:port of OpenAI's and Anthropic's API; port 0 picks a free one,"
            " empty: none",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
    any_address: Annotated[
        bool,
        Meta(
            description="serve callers without keys on an address that is not loopback: only behind"
            " something that checks them"
        ),
    ] = False
    pass_keys: Annotated[
        bool,
        Meta(
            description="pass clients' Authorization and X-Api-Key on to workers, though the"
            " gateway checks them itself"
        ),
    ] = False
    reuse_port: Annotated[
        bool, Meta(description="several gateways may listen on the same port (SO_REUSEPORT)")
    ] = False
    route_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a router's pick, its queue included")
    ] = 30.0
    silence_s: Annotated[
        Seconds, Meta(description="longest time for which a worker may send nothing")
    ] = 600.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for open requests at SIGTERM")
    ] = 300.0
    accept_after_stop_s: Annotated[
        Seconds,
        Meta(
            description="seconds after SIGTERM in which requests are still served, each as the last"
            " of its connection; part of gateway.drain_timeout_s"
        ),
    ] = 5.0
    body_mib_max: Annotated[
        int, Meta(ge=1, le=1024, description="largest body of a request, unpacked, in MiB")
    ] = 32
    bodies_mib_max: Annotated[
        int, Meta(ge=1, le=1 << 20, description="bodies of all open requests together, in MiB")
    ] = 1024
    open_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="open requests; more are answered with 429")
    ] = 4096
    client_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of gateway.open_max and gateway.bodies_mib_max that one client may"
            " hold: a key, or an address where clients need none; 1 behind a proxy that is the"
            " address of all clients",
        ),
    ] = 0.5
    cors_origins: Annotated[
        tuple[Origin, ...],
        Meta(
            description="origins whose pages may read answers in a browser, such as"
            " https://chat.example, or `*` for all; without cookies and certificates; none: only"
            " the gateway's own"
        ),
    ] = ("*",)
    pairs: Annotated[
        Literal["auto", "never"],
        Meta(description="auto: requests get a prefill worker where the fleet has some"),
    ] = "auto"
    forward: Annotated[
        Literal["body", "tokens"],
        Meta(
            description="tokens: chats go on with their prompt's tokens, so that engines do not"
            " tokenise again; only tokens that are verified, and only to engines that take them"
        ),
    ] = "body"
    priority: Annotated[
        Literal["higher", "lower"],
        Meta(description="whether a higher or a lower `priority` in a body is sooner"),
    ] = "higher"
    salt: Annotated[
        Literal["client", "tenant"],
        Meta(
            description="whose `cache_salt` routers and engines get. client: the body's own, so"
            " that tenants share prefixes and can tell what others have cached; tenant: one made of"
            " the request's tenant, or of its key where that has none"
        ),
    ] = "client"
    answer_headers: Annotated[
        bool,
        Meta(description="answers have X-Kvroute-Worker, -Overlap-Tokens and -Reservation"),
    ] = False


class GatewayProcessSettings(GatewaySettings, frozen=True):
    """Those of a gateway in a process of its own."""

    listen: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port of OpenAI's and Anthropic's API; port 0 picks a free one",
        ),
    ] = "127.0.0.1:8080"
