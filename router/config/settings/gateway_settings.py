"""The settings of a gateway: frozen, with bounds."""

from typing import Annotated, Literal

from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings

Origin = Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\s,*]+)$")]
"""Origin of web pages, scheme://host[:port], or * for every origin."""


class GatewaySettings(Settings, frozen=True):
    """The gateway, an HTTP server for OpenAI's and Anthropic's clients."""

    listen: Annotated[
        str,
        Meta(
            description="host:port where the gateway serves OpenAI's and Anthropic's API; port 0"
            " picks a free port, empty: no gateway",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = ""
    any_address: Annotated[
        bool,
        Meta(
            description="serve clients without keys on an address that is not loopback; use it"
            " only behind a proxy that checks clients"
        ),
    ] = False
    pass_keys: Annotated[
        bool,
        Meta(
            description="pass clients' headers Authorization and X-Api-Key on to workers, even"
            " where the gateway checks them itself"
        ),
    ] = False
    reuse_port: Annotated[
        bool, Meta(description="let several gateways listen on the same port (SO_REUSEPORT)")
    ] = False
    silence_s: Annotated[
        Seconds,
        Meta(
            description="seconds for which a worker may send nothing before its request counts as"
            " failed"
        ),
    ] = 600.0
    open_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="most open requests of the gateway; further ones are answered with 429",
        ),
    ] = 4096
    client_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share (0 to 1) of gateway.open_max and requests.bodies_mib_max that"
            " one client (a key, or without keys an IP address) may use; set 1 behind a"
            " proxy, whose address all clients have",
        ),
    ] = 0.5
    cors_origins: Annotated[
        tuple[Origin, ...],
        Meta(
            description="origins whose pages may read the gateway's answers in a browser"
            " (CORS), such as https://chat.example, or `*` for all; empty: only pages of the"
            " gateway's own origin"
        ),
    ] = ("*",)
    forward: Annotated[
        Literal["body", "tokens"],
        Meta(
            description="what workers get. body: the client's body; tokens: for chats the prompt's"
            " tokens, too, so that engines do not tokenize again, if the tokens were compared with"
            " an engine's and the engine takes tokens"
        ),
    ] = "body"
    salt: Annotated[
        Literal["client", "tenant"],
        Meta(
            description="origin of the `cache_salt` that routers and engines get. client: the body"
            " (tenants without a salt can measure what others have cached); tenant: a hash of the"
            " body's salt, the tenant and, for a key that has no tenant, the key's name; without"
            " keys and without a tenant header, the body's salt"
        ),
    ] = "client"
    observe: Annotated[
        bool,
        Meta(
            description="only decide about requests, which another router or proxy serves and"
            " mirrors here: each is counted, logged and answered by status 204; nothing is"
            " forwarded or reserved"
        ),
    ] = False
    answer_headers: Annotated[
        bool,
        Meta(
            description="send the headers X-Kvroute-Worker, X-Kvroute-Overlap-Tokens and"
            " X-Kvroute-Reservation with each answer, and for a pair X-Kvroute-Prefill-Worker"
        ),
    ] = False


class GatewayProcessSettings(GatewaySettings, frozen=True):
    """Settings of a gateway in a process of its own."""

    listen: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port of OpenAI's and Anthropic's API; port 0 picks a free one",
        ),
    ] = "127.0.0.1:8080"
