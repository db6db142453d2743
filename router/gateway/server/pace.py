"""How long the gateway waits for the bytes of a client's body. Pure.

Law: a body that comes at PACE_BYTES_PER_S is not refused before BODY_S of waiting, and no body is
waited for longer.
"""

BODY_S = 120.0
"""Longest wait for all bytes of one body, in seconds."""
GRACE_S = 10.0
"""Seconds of waiting before a body's pace counts."""
PACE_BYTES_PER_S = 1024
"""Least pace of a body after GRACE_S; Apache's mod_reqtimeout has 500 after 20 s."""


def wait_s(came: int) -> float:
    """Seconds for which a body may be waited for in all, after `came` bytes of it have come."""
    return min(GRACE_S + came / PACE_BYTES_PER_S, BODY_S)


def too_slow(waited_s: float) -> str:
    """Error message for a client whose body was waited for too long, waited_s seconds."""
    if waited_s >= BODY_S:
        return f"the body did not come whole within {BODY_S:g} s"
    return f"the body came at less than {PACE_BYTES_PER_S} bytes a second after {GRACE_S:g} s"
