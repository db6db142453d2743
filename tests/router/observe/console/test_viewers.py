"""Viewers: bounded queues, and no viewer that others wait for."""

from router.observe.console.viewers import WAITING_MAX, Viewers


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


async def test_a_stop_ends_all_and_none_comes_after_it() -> None:
    viewers = Viewers(2)
    viewer = viewers.join(lambda: None)
    assert viewer is not None
    viewers.publish(b"tick", lambda: b"whole")
    viewers.stop()
    assert await viewer.next() is None
    assert viewers.ended["stopped"] == 1
    assert viewers.join(lambda: None) is None
