"""What metrics and people see of the queue."""

from router.config.settings.queue_settings import BandSettings, QueueSettings
from router.decide.queue.views import rows, sums
from tests.router.decide.queue.waiting import offered, queue_of

BANDS = (BandSettings(name="low", from_priority=0), BandSettings(name="high", from_priority=10))


def test_a_row_says_how_long_where_and_behind_whom() -> None:
    queue = queue_of(bands=BANDS, bands_strict=True)
    second = offered(queue, "a", 1.0, expires_s=11.0, tenant="blue")
    first = offered(queue, "b", 2.0, priority=12)
    offered(queue, "c", 3.0, model="other")
    offered(queue, "d", 3.0)
    b, a, d, c = rows(queue, 4.0, 9)
    assert (b.request_id, b.place, b.behind, b.band, b.held_by) == ("b", 0, "", "high", "room")
    assert (a.request_id, a.place, a.behind, a.band, a.held_by) == ("a", 1, "b", "low", "turn")
    assert (a.tenant, a.waited_s, a.expires_in_s, a.priority) == ("blue", 3.0, 7.0, 0)
    assert (d.place, d.behind, d.held_by) == (2, "a", "turn")
    assert (c.pool, c.place, c.behind) == ("other", 0, "")
    queue.passed(first, 7)
    queue.passed(second, 7)
    assert [row.held_by for row in rows(queue, 4.0, 9)] == ["room", "room", "turn", "room"]


def test_rows_are_bounded() -> None:
    queue = queue_of()
    for number in range(5):
        offered(queue, str(number))
    assert len(list(rows(queue, 0.0, 3))) == 3


def test_every_band_has_its_depth_and_its_oldest_request() -> None:
    queue = queue_of(bands=BANDS, bands_aging=0.0)
    offered(queue, "a", 1.0)
    offered(queue, "b", 2.0)
    depths = sums(queue, 5.0).bands
    assert list(depths) == ["low", "high"]
    assert (depths["low"].count, depths["low"].oldest_s) == (2, 4.0)
    assert (depths["high"].count, depths["high"].oldest_s) == (0, 0.0)


def test_the_tenants_with_most_waiting_requests_are_named() -> None:
    queue = queue_of()
    for number, tenant in enumerate(("blue", "red", "red", "green", "red", "green")):
        offered(queue, str(number), tenant=tenant)
    assert sums(queue, 0.0).largest_tenants(2) == [("red", 3), ("green", 2), ("other", 1)]
    assert sums(queue, 0.0).largest_tenants(3) == [("red", 3), ("green", 2), ("blue", 1)]


def test_one_pool_is_shown_alone() -> None:
    queue = queue_of()
    offered(queue, "a", tenant="blue")
    offered(queue, "b", model="other", tenant="red")
    (row,) = rows(queue, 0.0, 9, "other".__eq__)
    assert row.request_id == "b"
    found = sums(queue, 0.0, "other".__eq__)
    assert (found.count, found.tenants) == (1, {"red": 1})


def test_rows_are_those_of_the_call_though_requests_come_and_go() -> None:
    queue = queue_of(bands=BANDS)
    first = offered(queue, "a", priority=12)
    shown = rows(queue, 0.0, 9)
    queue.cancel(first, 0.0)
    queue.configure(QueueSettings(), 0.0)
    offered(queue, "b")
    assert [(row.request_id, row.band) for row in shown] == [("a", "high")]
