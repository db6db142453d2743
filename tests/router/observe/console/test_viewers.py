"""Viewers: bounded queues, and no viewer that others wait for."""

from router.observe.console.viewers import WAITING_MAX, Viewers


def nothing() -> None:
    pass


async def test_a_slow_viewer_is_dropped_and_the_others_get_every_message() -> None:
    cut: list[str] = []
    viewers = Viewers(8)
    slow = viewers.join(lambda: cut.append("slow"))
    quick = viewers.join(lambda: cut.append("quick"))
    assert slow is not None
    assert quick is not None
    got = []
    for n in range(WAITING_MAX + 3):
        viewers.publish(b"tick %d" % n, lambda: b"whole")
        got.append(await quick.next())
    assert got == [b"whole", *(b"tick %d" % n for n in range(1, WAITING_MAX + 3))]
    assert cut == ["slow"]
    assert (slow.end, await slow.next()) == ("slow", None)
    assert viewers.ended["slow"] == 1
    assert len(viewers) == 1


async def test_viewers_past_the_bound_are_refused() -> None:
    viewers = Viewers(2)
    first = viewers.join(nothing)
    assert first is not None
    assert viewers.join(nothing) is not None
    assert viewers.join(nothing) is None
    assert viewers.refused == 1
    viewers.leave(first)
    viewers.leave(first)
    assert viewers.ended["left"] == 1
    assert viewers.join(nothing) is not None


async def test_a_stop_ends_all_and_none_comes_after_it() -> None:
    viewers = Viewers(2)
    viewer = viewers.join(nothing)
    assert viewer is not None
    viewers.publish(b"tick", lambda: b"whole")
    viewers.stop()
    assert await viewer.next() is None
    assert viewers.ended["stopped"] == 1
    assert viewers.join(nothing) is None
