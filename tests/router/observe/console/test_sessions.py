"""Sign-ins: a life, a bound, and ids that repeat nothing of the key."""

import random

from router.observe.console.sessions import SESSIONS_MAX, Sessions


def test_a_session_ends_with_its_time() -> None:
    sessions = Sessions(100.0, random.Random(1).randbytes)
    session_id = sessions.begin("key", 0.0)
    assert "key" not in session_id
    found = sessions.find(session_id, 99.9)
    assert found is not None
    assert found.token == "key"
    assert sessions.find(session_id, 100.0) is None
    assert not len(sessions)


def test_a_newcomer_over_the_bound_ends_the_oldest() -> None:
    sessions = Sessions(100.0, random.Random(1).randbytes)
    ids = [sessions.begin(f"key {i}", 0.0) for i in range(SESSIONS_MAX + 1)]
    assert len(set(ids)) == SESSIONS_MAX + 1
    assert len(sessions) == SESSIONS_MAX
    assert sessions.find(ids[0], 1.0) is None
    assert sessions.find(ids[1], 1.0) is not None
