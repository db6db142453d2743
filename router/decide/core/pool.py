"""The name of a pool of workers that requests wait for. Pure."""

from typing import NamedTuple

from router.request.request import Role


class Pool(NamedTuple):
    """Name of a pool: a model, by any of its names or LoRAs, and a role. Requests of one pool wait
    in one order.
    """

    model: str
    role: Role
