"""The one clock of the shells: Unix time that never goes back."""

import time

_STARTED_S = time.time() - time.monotonic()


def unix_now() -> float:
    """Seconds since 1970: the wall clock at our start plus the monotonic clock since then.

    Comparable with other hosts' times to within clock skew, and unaffected when the clock is set.
    """
    return _STARTED_S + time.monotonic()
