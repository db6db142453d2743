"""The one clock of the shells: Unix time that never goes back."""

import time

_STARTED_S = time.time() - time.monotonic()


def unix_now() -> float:
    """Seconds since 1970 by the wall clock at our start, going on with the monotonic clock.

    Comparable with other hosts' times to within clock skew, and steady when the wall clock is set.
    """
    return _STARTED_S + time.monotonic()
