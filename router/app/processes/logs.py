"""Logs on standard error: plain lines for people, JSON lines for machines."""

import logging
import sys
import time
from typing import Any

import msgspec
from typing_extensions import override

from router.config.printable import shown
from router.config.settings.serving_settings import LogSettings

REPEAT_S = 10.0
"""Seconds for which an equal warning or error is not logged again. The next one logged has the
number of those left out."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time in UTC, level, logger, message, and the traceback if any."""

    converter = staticmethod(time.gmtime)

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class PlainFormatter(logging.Formatter):
    """Formats log lines for people, with control characters of foreign names escaped."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(shown, super().format(record).split("\n")))


class RepeatFilter(logging.Filter):
    """Leaves out warnings and errors that equal one of the last REPEAT_S seconds, by logger and
    message. Remembers _ENTRIES_MAX messages."""

    _ENTRIES_MAX = 1000

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.getMessage())
        said_at, held_back = self._said.get(key, (float("-inf"), 0))
        if record.created - said_at < REPEAT_S:
            self._said[key] = (said_at, held_back + 1)
            return False
        if len(self._said) >= self._ENTRIES_MAX:
            del self._said[next(iter(self._said))]
        self._said[key] = (record.created, 0)
        if held_back:
            record.msg = f"{record.getMessage()} (and {held_back} times before)"
            record.args = ()
        return True


def set_up(settings: LogSettings) -> None:
    """Directs all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    formatter: logging.Formatter
    if as_json:
        formatter = JsonFormatter()
    else:
        formatter = PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(formatter)
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("asyncio", "nats", "aiohttp.access", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
