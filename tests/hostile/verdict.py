"""What a run of attacks shows: a line for each attack and kind of call, and the laws broken.

Laws, of each attack: every call of the good client is answered; the 99th percentile of each kind is
at most RATIO_MAX times that without the attack, in the median of the rounds; no turn of the
server's loop takes more than TURN_MS_MAX of CPU time; a minute later the server's memory is within
a tenth of what it was. RATIOS and KEPT_MIB have the exceptions, each with its bound and reason.
"""

from collections.abc import Sequence
from statistics import median

import msgspec

from tests.hostile.good import Calls
from tests.hostile.stage import MEMORY_SHARE, RECOVERY_S

RATIO_MAX = 2.0
FLOOR_MS = 5.0
"""A percentile below it counts as this: a client on the server's core waits for the server's and
its own other calls so long."""
RATIOS = {
    "unread": {"metrics": 4.0},  # a scrape waits behind the requests that the attacker pipelined
    # The reader of JSON holds Python's one running thread until a body of 17 MiB ends.
    "many_keys": dict.fromkeys(("chat", "connect", "gateway", "metrics", "pick", "route"), 4.0),
}
"""Attack -> kind of call -> its ratio at most, where RATIO_MAX does not hold."""
KEPT_MIB = {
    "streams": 150.0,  # of 20,000 open calls
    "drips": 100.0,  # of 2,000 bodies that hardly come
    # Of answers of megabytes, and the good client's own requests of these two minutes.
    **dict.fromkeys(("unread", "unread_answers", "control_frames"), 25.0),
}
"""Attack -> memory that the server may keep. None of it is the attack's: glibc and Python count as
many bytes and blocks as after random bytes; their free pieces stay for the next burst."""
TURN_MS_MAX = 50.0
HEAD = (
    "| attack | call | answered | failed | p99 before, ms | p99 under attack, ms | ratio |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


class Rounds(msgspec.Struct):
    """Those of one attack."""

    name: str
    usual: Sequence[Calls]
    under: Sequence[Calls]
    turn_ms: float
    """CPU time of the longest turn of the server's loop."""
    before_mib: float
    after_mib: float

    def ratio(self, kind: str) -> float:
        """Median of the rounds; infinite for a kind that was not answered in most of them."""
        pairs = zip(self.usual, self.under, strict=True)
        return median(
            max(FLOOR_MS, under.p99_ms(kind)) / max(FLOOR_MS, usual.p99_ms(kind))
            for usual, under in pairs
        )

    def lines(self) -> list[str]:
        """Of the table."""
        lines = []
        for kind in self.under[0].seconds:
            answered = sum(len(calls.seconds[kind]) for calls in self.under)
            failed = sum(
                one.startswith(f"{kind}:") for calls in self.under for one in calls.failures
            )
            before = median(calls.p99_ms(kind) for calls in self.usual)
            during = median(calls.p99_ms(kind) for calls in self.under)
            lines.append(
                f"| {self.name} | {kind} | {answered} | {failed} | {before:.1f} | {during:.1f}"
                f" | {self.ratio(kind):.1f} |"
            )
        return lines

    def broken(self) -> list[str]:
        """The laws that did not hold, in words."""
        broken = [
            f"{self.name}: a call failed: {one}"
            for calls in (*self.usual, *self.under)
            for one in sorted({text.partition(":")[0]: text for text in calls.failures}.values())
        ]
        broken += [
            f"{self.name}: p99 of {kind} is {ratio:.1f} times the usual one"
            for kind in self.under[0].seconds
            if (ratio := self.ratio(kind)) > RATIOS.get(self.name, {}).get(kind, RATIO_MAX)
        ]
        if self.turn_ms > TURN_MS_MAX:
            broken.append(f"{self.name}: a turn of the loop took {self.turn_ms:.0f} ms of CPU")
        kept_mib = KEPT_MIB.get(self.name, 0.0)
        if self.after_mib > max(MEMORY_SHARE * self.before_mib, self.before_mib + kept_mib):
            broken.append(
                f"{self.name}: memory {self.before_mib:.0f} MiB before,"
                f" {self.after_mib:.0f} MiB {RECOVERY_S:g} s after"
            )
        return broken
