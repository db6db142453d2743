"""Limits the rate of log lines that any client can cause."""

import logging
from math import inf

LOG_S = 10.0
"""Least seconds between two log lines of one subject, such as refused connections."""


class Seldom:
    """Logs lines of one subject, at most one in LOG_S seconds."""

    def __init__(self, log: logging.Logger, level: int = logging.WARNING) -> None:
        self._log = log
        self._level = level
        self._logged_s = -inf
        self._more = 0
        """Number of lines left out since the last logged one."""

    def log(
        self, now_s: float, words: str, *about: object, error: BaseException | None = None
    ) -> None:
        """Logs the words unless the last line was less than LOG_S ago. now_s: monotonic seconds.
        error: logged with its traceback."""
        if now_s - self._logged_s < LOG_S:
            self._more += 1
            return
        others = f" ({self._more} more since the last such line)" if self._more else ""
        self._logged_s, self._more = now_s, 0
        self._log.log(self._level, words + "%s", *about, others, exc_info=error)
