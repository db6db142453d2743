"""Objects that their count of references frees, without a look of the collector."""

import gc
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.stage.waiting import until


@asynccontextmanager
async def freed_at_once(*kinds: type) -> AsyncIterator[None]:
    """All objects of these kinds that begin inside are gone in the end: kvroute's processes look
    for cycles among old objects only every few hours (router/app/cli/run.py)."""

    def alive() -> int:
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # what another test left unclosed
        gc.collect()
    # What was there before is not looked at any more: a look at all objects takes a second.
    gc.freeze()
    gc.disable()
    try:
        yield
        await until(lambda: not alive(), f"the end of {[kind.__name__ for kind in kinds]}")
    finally:
        gc.enable()
