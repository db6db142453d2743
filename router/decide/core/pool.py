"""What requests wait for: the name of a pool of workers. Pure."""

from typing import NamedTuple

from router.request.request import Role


class Pool(NamedTuple):
    """Requests of one pool wait in one order: those for the same model, by any of its names or
    LoRAs, and for the same role."""

    model: str
    role: Role
