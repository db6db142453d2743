"""Changes of standing, within a bound."""

from indexer.identity import WorkerKey
from router.observe.views.news import GONE, NEW, NEWS_MAX, News

A, B = WorkerKey("a", 0), WorkerKey("b", 1)


def test_the_first_look_learns_and_later_ones_tell_what_changed() -> None:
    news = News()
    news.look({A: ("live", "")}, 1.0)
    assert not news.kept
    news.look({A: ("silent", "no beat"), B: ("live", "")}, 2.0)
    assert [(c.worker_id, c.was, c.now, c.why) for c in news.kept] == [
        ("a", "live", "silent", "no beat"),
        ("b", NEW, "live", ""),
    ]
    news.look({B: ("live", "")}, 3.0)
    (last,) = news.since(2)
    assert (last.worker_id, last.was, last.now, last.at_s) == ("a", "silent", GONE, 3.0)


def test_a_fleet_at_rest_adds_nothing() -> None:
    news = News()
    for second in range(10):
        news.look({A: ("live", f"{second}")}, float(second))
    assert not news.kept


def test_the_oldest_changes_go() -> None:
    news = News()
    for second in range(NEWS_MAX + 11):
        news.look({A: (f"state {second}", "")}, float(second))
    assert len(news.kept) == NEWS_MAX
    assert news.kept[0].number == 11
    assert news.count == NEWS_MAX + 10
