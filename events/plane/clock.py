"""The clock of relays and routers: Unix time that never goes back."""

import time

_STARTED_S = time.time() - time.monotonic()


def unix_now() -> float:
    """Seconds since 1970: the wall clock at this process's start plus the monotonic time since.

    Comparable with other hosts' times to within clock skew, and unaffected when the clock is set.
    """
    return _STARTED_S + time.monotonic()
