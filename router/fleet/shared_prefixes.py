"""Prefixes that many prompts begin with, such as a system prompt. Pure.

A prompt *branches* at the last block of its longest match on any worker: what follows is new to the
fleet. Where one session goes on, each of its prompts branches at another block, the end of the
prompt before; where many begin with the same text, all branch at the end of that.

A worker without a shared prefix has to compute it once, and every later prompt that it gets finds
it there. So the first prompt computes for the later ones, too, and *invests* their part:

    earlier  = prompts that branched at the same block before; one of HALF_S ago counts half
    later    = EXPECTED * (earlier - FORKS) / workers, 0 at least: such prompts that each worker
               will get, if they come as before
    invested = later / (1 + later) * tokens of the prefix that the worker lacks

Nothing is invested where the prompt would take more than ROOM_SHARE of the cache, with the worker's
working set (router/fleet/working_set.py): there the prefix would take the place of blocks that come
again, and would soon be gone itself.

Laws:
- a prompt of which nothing is cached anywhere branches nowhere;
- in a prefix nothing is invested until the last investment in it is computed, so that in a burst
  one worker after the other computes it, and not all at once;
- where at most FORKS prompts branched before, as in a session, nothing is invested;
- a worker that has the whole prefix, or whose room is unknown, gets nothing invested;
- at most PREFIXES_MAX prefixes are kept: past it, the one that was used longest ago is forgotten,
  and counted.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf

import numpy as np
import numpy.typing as npt

from indexer.hashing import HashArray
from router.fleet.table import Column

HALF_S = 30.0
"""Seconds after which a prompt counts half: those of the last minute are three quarters of all."""
FORKS = 2.0
"""Prompts that may branch at one block without others to follow, as an agent's parallel requests on
its history do. With 0, an agentic trace lost 5 % (docs/decisions.md)."""
EXPECTED = 7.0
"""Prompts expected in the next five minutes for each that counts as earlier: of prompts that come
evenly, those of 43 s (HALF_S / ln 2) count."""
ROOM_SHARE = 0.7
"""Share of a worker's KV blocks that a prompt may fill, with the working set, to invest. With 1,
copies of many prefixes filled caches that the sessions of a trace need (docs/decisions.md)."""
PREFIXES_MAX = 4096
"""Prefixes that are kept: 1 MiB."""

_NEVER = 0.0, 0.0, -inf


class SharedPrefixes:
    """The blocks at which prompts of this replica branched."""

    def __init__(self) -> None:
        self.forgotten = 0
        """Prefixes dropped for want of room."""
        self._branched: OrderedDict[int, tuple[float, float, float]] = OrderedDict()
        """PrefixHash of the last block -> prompts that branched there, when they were counted, and
        when one was last sent to a worker that lacked it; the last used last."""

    def __len__(self) -> int:
        return len(self._branched)

    def on_pick(
        self, prefixes: HashArray, matched_blocks: int, now_s: float, invests: bool = False
    ) -> None:
        """Counts a prompt. matched_blocks: blocks of its longest match on any worker. invests:
        whether the picked worker lacks some of these blocks."""
        if not 0 < matched_blocks <= len(prefixes):
            return
        key = int(prefixes[matched_blocks - 1])
        _, _, invested_s = self._branched.get(key, _NEVER)
        invested_s = now_s if invests else invested_s
        self._branched[key] = self._counted(key, now_s) + 1.0, now_s, invested_s
        self._branched.move_to_end(key)
        if len(self._branched) > PREFIXES_MAX:
            self._branched.popitem(last=False)
            self.forgotten += 1

    def earlier(self, prefixes: HashArray, matched_blocks: int, now_s: float) -> float:
        """Prompts that branched before at the block where this one would, old ones counting less;
        0: it branches nowhere."""
        if not 0 < matched_blocks <= len(prefixes):
            return 0.0
        return self._counted(int(prefixes[matched_blocks - 1]), now_s)

    def invested(
        self,
        prefixes: HashArray,
        usable: npt.NDArray[np.int32],
        longest: int,
        block_size: int,
        room: Callable[[], Column],
        rate: float,
        now_s: float,
    ) -> Column | None:
        """Tokens that a prompt would invest on each worker; None: none on any.

        prefixes: of its full blocks. usable: its overlap with each worker, in tokens; longest: the
        largest of them. room: returns the KV blocks of each worker that a prompt may fill beside
        the working set; NaN: unknown. rate: tokens that a worker computes in a second.
        """
        matched_blocks = longest // block_size
        earlier = self.earlier(prefixes, matched_blocks, now_s)
        if earlier <= FORKS:
            return None
        _, _, invested_s = self._branched[int(prefixes[matched_blocks - 1])]
        missing = longest - usable
        if now_s - invested_s < longest / rate or not missing.any():
            return None
        later = EXPECTED * (earlier - FORKS) / len(usable)
        needed = len(prefixes) - usable / block_size
        return np.where(room() >= needed, later / (1.0 + later) * missing, 0.0)

    def _counted(self, key: int, now_s: float) -> float:
        count, at_s, _ = self._branched.get(key, _NEVER)
        return float(count * 0.5 ** (max(0.0, now_s - at_s) / HALF_S))
