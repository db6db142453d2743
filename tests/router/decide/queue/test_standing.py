"""A heap from which any request may go."""

from hypothesis import given
from hypothesis import strategies as st

from router.decide.queue_limits.standing import SPARE, Standing
from router.decide.waiter import Waiter

CHANGES = st.lists(st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers(0, 9))))


@given(changes=CHANGES)
def test_the_lowest_is_that_of_the_live_ones(changes: list[tuple[int, int | None]]) -> None:
    waiters = [Waiter(str(number), 0.0, seq=number) for number in range(41)]
    standing = Standing()
    live: dict[Waiter, float] = {}
    for who, number in changes:
        waiter = waiters[who]
        if number is None:
            standing.discard(waiter)
            live.pop(waiter, None)
        else:
            standing.put(waiter, float(number))
            live[waiter] = float(number)
        lowest = min(live.items(), key=lambda row: (row[1], row[0].seq), default=None)
        found = standing.lowest()
        assert (found and (found[1], found[0])) == lowest
        assert len(standing) == len(live)


def test_entries_of_requests_that_are_gone_are_bounded() -> None:
    standing = Standing()
    stays = Waiter("stays", 0.0)
    standing.put(stays, 0.0)
    for number in range(10 * SPARE):
        waiter = Waiter(str(number), 0.0, seq=number)
        standing.put(waiter, 1.0)
        standing.discard(waiter)
        assert len(standing._heap) <= 2 * len(standing) + SPARE
    for number in range(10 * SPARE):
        standing.put(stays, float(number))
        assert len(standing._heap) <= 2 + SPARE
    assert standing.lowest() == (10.0 * SPARE - 1, stays)
