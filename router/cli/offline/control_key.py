"""`kvroute control-key`."""

import click

from router.keys.control_keys import new_key


@click.command("control-key")
def control_key() -> None:
    """Make a key by which routers sign fleet commands: its seed, then its public key.

    The seed goes into the file of control.key_file, a Secret; the public key, during a rotation,
    into that of control.trusted_keys_file. Neither is kept anywhere.
    """
    click.echo("\n".join(new_key()))
