"""Log lines about workers whose heartbeats stop or begin again. Pure.

Law: workers whose streams fall silent between two calls have one line, and so have those that beat
again; the line names them, or has their number where they are more than NAMED_MAX.
"""

from collections.abc import Iterable

from events.feed.fleet_view import Source
from events.feed.stream import StreamState
from indexer.identity import WorkerKey

NAMED_MAX = 8


class SilenceLog:
    """Makes the log lines of one router about workers whose heartbeats stop or begin again."""

    def __init__(self) -> None:
        self._silent: set[WorkerKey] = set()

    def lines(self, sources: Iterable[Source]) -> list[str]:
        """Log lines about the changes since the last call. Workers that were forgotten have a line
        elsewhere.
        """
        states = {source.key: source.stream.state for source in sources}
        silent = {key for key, state in states.items() if state is StreamState.SILENT}
        fell, came = silent - self._silent, (self._silent - silent) & states.keys()
        self._silent = silent
        lines = []
        if fell:
            lines.append(f"{_named(fell)} silent: no beat of a relay comes")
        if came:
            lines.append(f"{_named(came)} there again: the relay beats")
        return lines


def _named(keys: set[WorkerKey]) -> str:
    if len(keys) > NAMED_MAX:
        return f"{len(keys)} workers are"
    names = ", ".join(map(str, sorted(keys)))
    return f"worker {names} is" if len(keys) == 1 else f"workers {names} are"
