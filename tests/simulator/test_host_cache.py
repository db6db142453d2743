"""The host cache: what goes when room is needed, and what never does."""

from simulator.engines.block_pool import PoolEvent, Removed, Stored
from simulator.engines.host_cache import HostCache


class Host:
    """A host cache and who listens to it."""

    def __init__(self, block_count: int) -> None:
        self.told: list[PoolEvent] = []
        self.cache = HostCache(block_count, self.told.append)

    def keep(self, *hashes: int) -> bool:
        """A request offers its blocks, in a step of its own."""
        chain = list(hashes)

        def stored(first: int, last: int) -> Stored:
            parent = chain[first - 1] if first else None
            return Stored(tuple(chain[first:last]), parent, (), ())

        kept = self.cache.offer(chain, 0, stored, set())
        self.cache.settle()
        return kept

    def removed(self) -> list[int]:
        return [one for event in self.told if isinstance(event, Removed) for one in event.hashes]


def test_the_longest_unused_goes_and_an_end_makes_blocks_the_last_used_tails_first() -> None:
    host = Host(4)
    host.keep(1, 2)
    host.keep(3, 4)
    host.cache.touch([1, 2])
    host.keep(5)
    host.keep(6, 7)
    assert host.removed() == [3, 4, 2]


def test_what_is_there_already_is_not_told_again_and_a_hole_splits_the_news() -> None:
    host = Host(8)
    host.keep(2)
    host.keep(1, 2, 3)
    told = [event for event in host.told if isinstance(event, Stored)]
    assert [(one.hashes, one.parent) for one in told] == [((2,), None), ((1,), None), ((3,), 2)]


def test_a_prefix_is_found_without_a_hole_from_where_the_device_ends() -> None:
    host = Host(8)
    host.keep(2, 3)
    host.keep(5)
    assert host.cache.run_length([1, 2, 3, 4, 5], 1, 5) == 2
    assert host.cache.run_length([1, 2, 3, 4, 5], 0, 5) == 0


def test_blocks_that_are_being_loaded_stay_and_who_finds_no_room_leaves_all_as_it_was() -> None:
    host = Host(3)
    host.keep(1, 2)
    host.cache.begin_load([1, 2])
    assert not host.keep(3, 4)
    assert host.removed() == []
    assert host.cache.any_loading([9, 1])
    host.cache.end_load([1, 2])
    assert not host.cache.any_loading([1])
    assert host.keep(3, 4)
    assert host.removed() == [1]


def test_a_chain_longer_than_the_host_is_not_kept() -> None:
    host = Host(2)
    assert not host.keep(1, 2, 3)
    assert not list(host.cache.contents())


def test_blocks_of_the_same_step_dont_push_one_another_out() -> None:
    host = Host(2)
    news = Stored((1, 2), None, (), ())
    assert host.cache.offer([1, 2], 0, lambda first, last: news, set())
    assert not host.cache.offer([3], 0, lambda first, last: news, set())
    host.cache.settle()
    assert host.cache.offer([3], 0, lambda first, last: news, set())
