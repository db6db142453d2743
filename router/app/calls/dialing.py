"""Connects a command to a router: address, TLS, the caller's certificate and token."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from typing_extensions import override

from events.plane.clock import unix_now
from router.app.cli.flags import shared_option
from router.config.printable import shown
from router.config.reading import TARGET_VARIABLES
from router.config.settings.keys_settings import DialSettings

if TYPE_CHECKING:
    from kvroute.client import KvRouteClient

Command = TypeVar("Command", bound=Callable[..., Any])
_META = "router.app.calls.dialing"


def _a_target(_context: click.Context, _option: click.Parameter, text: str) -> str:
    from kvroute.client.connections.channel import targets_of

    if not text.strip():
        raise click.BadParameter("expected HOST:PORT or unix:PATH")
    try:
        targets_of(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


def _keep(context: click.Context, option: click.Parameter, value: object) -> None:
    """Keeps a flag for `dial`, so that no command has to pass it on."""
    context.meta.setdefault(_META, {})[str(option.name).removeprefix("target_")] = value


_FLAGS = {
    "--tls": "Call over TLS; trust the system's CAs unless --tls-ca is given.",
    "--tls-ca": "PEM file of the CAs of the router's certificate; turns TLS on.",
    "--tls-certificate": "PEM file of your own certificate, for mutual TLS.",
    "--tls-key": "PEM file with the private key of --tls-certificate.",
    "--tls-name": "Name in the router's certificate, where it is not the host of --target.",
    "--token-file": "File with your bearer token.",
}
_option = shared_option("Options of calls to a router")
_KEYS = ("tls", "ca_file", "certificate_file", "key_file", "name", "token_file")


def target_flag(command: Command) -> Command:
    """Adds --target and the flags of `dial` to a command."""
    flags = zip(_FLAGS.items(), _KEYS, TARGET_VARIABLES, strict=True)
    for (flag, text), key, variable in reversed(list(flags)):
        kind: dict[str, Any] = {"is_flag": True} if key == "tls" else {"type": str}
        command = _option(
            flag,
            f"target_{key}",
            envvar=variable,
            expose_value=False,
            callback=_keep,
            help=text,
            **kind,
        )(command)
    return _option(
        "--target",
        "-t",
        default="127.0.0.1:50051",
        envvar="KVROUTE_TARGET",
        show_default=True,
        callback=_a_target,
        help="gRPC address of the router, HOST:PORT or unix:PATH.",
    )(command)


class CallFailed(click.ClickException):
    """A call to a router failed: one line on stderr, and exit code 1."""

    @override
    def show(self, file: Any = None) -> None:
        click.echo(self.message, file, err=True)


@asynccontextmanager
async def dial(target: str, **options: Any) -> AsyncIterator["KvRouteClient"]:
    """Opens a client of the router at `target`, with TLS and token by the running command's flags.
    options: further arguments of the client. Raises ConfigError, and CallFailed for a call that
    failed (KvRouteError)."""
    from kvroute.client import KvRouteClient, KvRouteError
    from router.net.keys.dialing import dial_options

    flags = _flags()
    settings = dial_options(DialSettings(**flags), unix_now)
    async with KvRouteClient(target, **options, **settings) as client:
        try:
            yield client
        except KvRouteError as error:
            hint = _hint(flags, str(error))
            raise CallFailed(shown(f"kvroute: {target}: {error}{hint}")) from error


def _flags() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    return {} if context is None else context.meta.get(_META, {})


def _hint(flags: dict[str, Any], text: str) -> str:
    """Advice for an error text of gRPC that shows that only one side speaks TLS; else empty."""
    has_tls = flags.get("tls") or flags.get("ca_file") or flags.get("certificate_file")
    if not has_tls and any(words in text for words in _CLOSED):
        return "; if this port speaks TLS, give --tls-ca FILE, or --tls"
    if has_tls and _NO_HANDSHAKE in text:
        return "; if this port speaks no TLS, leave out --tls, --tls-ca and --tls-certificate"
    return ""


_CLOSED = ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY")
"""gRPC's words for a connection that the other side ended before its first answer."""
_NO_HANDSHAKE = "Handshake read failed"
"""gRPC's words for a connection that the other side ended during the TLS handshake."""
