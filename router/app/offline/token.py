"""The command `kvroute token`."""

import click

from router.net.keys.key_ring import new_token


@click.command()
def token() -> None:
    """Make a bearer token: the token on the first line, its hash on the second.

    The caller gets the token (--token-file, or `token` of the client), the key file its hash
    (`tokens` of an identity). The token is kept nowhere.
    """
    secret, hashed = new_token()
    click.echo(f"{secret}\n{hashed}")
