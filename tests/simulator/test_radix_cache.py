"""The radix cache, against a plain model of it and by example."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.content import ChainContent
from simulator.engines.radix_cache import RadixCache, RadixNode


def page(beginning: str) -> int:
    """The name of the page that ends a text's beginning."""
    return xxh3_64_intdigest(beginning.encode())


def chain(text: str) -> ChainContent:
    """One page a letter; equal beginnings have equal names."""
    return ChainContent([page(text[: i + 1]) for i in range(len(text))], text)


def insert(cache: RadixCache, text: str) -> tuple[RadixNode, int]:
    """A request computes all its pages and ends."""
    cache.make_room(len(text))
    cache.take(len(text))
    node, found = cache.insert(chain(text), len(text))
    cache.give_back(found)
    return node, found


def told(cache: RadixCache, *texts: str) -> list[tuple[str, str]]:
    """Events since the last call, pages by the beginnings of these texts that they end."""
    names = {page(text[: i + 1]): text[: i + 1] for text in texts for i in range(len(text))}
    lines = []
    for event in cache.take_events():
        match event:
            case Stored():
                lines.append(("stored", " ".join(names[one] for one in event.hashes)))
            case Removed():
                lines.append(("removed", " ".join(names[one] for one in event.hashes)))
            case Cleared():
                lines.append(("cleared", ""))
    return lines


def find(cache: RadixCache, text: str) -> int:
    return cache.find(chain(text).hashes(len(text)), len(text))


def test_splitting_a_node_is_not_told_and_the_rest_stays_cached() -> None:
    cache = RadixCache(16)
    insert(cache, "abcd")
    insert(cache, "abxy")
    assert told(cache, "abcd", "abxy") == [("stored", "a ab abc abcd"), ("stored", "abx abxy")]
    assert sorted(len(node.hashes) for node in cache.nodes()) == [2, 2, 2]
    assert [find(cache, text) for text in ("abcd", "abxyz", "abq", "b")] == [4, 4, 2, 0]
    assert (cache.free, cache.evictable, cache.protected, cache.private) == (10, 6, 0, 0)


def test_what_was_inserted_before_names_the_parent() -> None:
    cache = RadixCache(16)
    insert(cache, "ab")
    cache.take_events()
    insert(cache, "abcd")
    (event,) = cache.take_events()
    assert isinstance(event, Stored)
    assert event.parent == page("ab")


def test_a_chain_inserted_in_pieces_is_told_as_one() -> None:
    cache = RadixCache(16)
    insert(cache, "ab")
    insert(cache, "abcd")
    assert told(cache, "abcd") == [("stored", "a ab abc abcd")]


def test_the_leaf_unused_for_longest_is_evicted_whole_then_its_parent() -> None:
    cache = RadixCache(8)
    insert(cache, "abcd")
    insert(cache, "abxy")
    insert(cache, "pq")
    cache.take_events()
    cache.match(chain("abc").hashes(3), 3)  # uses a, b, c; d is used with its node
    assert cache.make_room(1)
    assert told(cache, "abxy") == [("removed", "abx abxy")]
    assert cache.make_room(3)
    assert told(cache, "pq") == [("removed", "p pq")]
    assert cache.make_room(8)
    assert told(cache, "abcd") == [("removed", "abcd abc a ab")]


def test_a_reset_waits_until_nobody_holds_pages() -> None:
    cache = RadixCache(4)
    node, _ = insert(cache, "ab")
    cache.lock(node)
    assert not cache.reset()
    cache.unlock(node)
    cache.take(1)
    assert not cache.reset()
    cache.give_back(1)
    cache.take_events()
    assert cache.reset()
    assert told(cache) == [("cleared", "")]
    assert (cache.free, cache.evictable) == (4, 0)
    insert(cache, "abcd")
    assert cache.make_room(4)


def test_pages_that_are_not_there_cant_be_taken_given_back_or_unlocked() -> None:
    cache = RadixCache(2)
    node, _ = insert(cache, "a")
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(node)
    with pytest.raises(ValueError, match="3 pages wanted"):
        cache.take(3)
    with pytest.raises(ValueError, match="1 pages given back"):
        cache.give_back(1)


texts = st.text("ab", min_size=1, max_size=9)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), texts),
        st.tuples(st.just("match"), texts),
        st.tuples(st.just("lock"), texts),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("room"), st.integers(0, 24)),
    ),
    max_size=60,
)


class Model:
    """Pages one by one, by the beginning of a text that each ends; and how often it is locked."""

    def __init__(self) -> None:
        self.pages: set[str] = set()
        self.locks: Counter[str] = Counter()

    def prefix(self, text: str) -> int:
        return next((i for i in range(len(text)) if text[: i + 1] not in self.pages), len(text))


def beginnings(text: str) -> list[str]:
    return [text[: i + 1] for i in range(len(text))]


@settings(max_examples=300, deadline=None)
@given(acts=acts)
def test_pages_add_up_and_prefixes_are_those_of_a_plain_model(acts: list[tuple[str, int]]) -> None:
    cache, model = RadixCache(24), Model()
    held: list[tuple[RadixNode, str]] = []
    heard: set[int] = set()

    def hear(events: list[PoolEvent]) -> None:
        for event in events:
            match event:
                case Stored():
                    assert heard.isdisjoint(event.hashes)
                    assert event.parent is None or event.parent in heard
                    heard.update(event.hashes)
                case Removed():
                    assert heard.issuperset(event.hashes)
                    heard.difference_update(event.hashes)
                case Cleared():
                    raise AssertionError

    for act, value in acts:
        match act, value:
            case "insert", str(text) if cache.make_room(len(text)):
                before = set(cache.contents())
                model.pages = {one for one in model.pages if page(one) in before}
                assert insert(cache, text)[1] == model.prefix(text)
                model.pages.update(beginnings(text))
            case "match", str(text):
                assert cache.match(chain(text).hashes(9), len(text))[1] == model.prefix(text)
            case "lock", str(text):
                node, pages = cache.match(chain(text).hashes(9), len(text))
                cache.lock(node)
                held.append((node, text[:pages]))
                model.locks.update(beginnings(text[:pages]))
            case "unlock", int(index) if held:
                node, text = held.pop(index % len(held))
                cache.unlock(node)
                model.locks.subtract(beginnings(text))
            case "room", int(pages):
                before = cache.free
                unlocked = sum(not model.locks[one] for one in model.pages)
                assert cache.available == before + unlocked
                assert cache.make_room(pages) == (pages <= before + unlocked)
        hear(cache.take_events())
        contents = list(cache.contents())
        model.pages = {one for one in model.pages if page(one) in heard}
        assert sorted(contents) == sorted(heard) == sorted(map(page, model.pages))
        assert cache.free + cache.evictable + cache.protected == cache.page_count
        assert cache.private == 0
        assert cache.protected == sum(model.locks[one] > 0 for one in model.pages)
        for node in cache.nodes():
            assert node.hashes
            assert node.parent is not None
            assert node.parent.children[node.hashes[0]] is node
            assert node.parent is cache.root or node.parent.lock_count >= node.lock_count
        assert len(cache._queue) <= sum(1 for _ in cache.nodes()) + 1


@settings(max_examples=200, deadline=None)
@given(inserted=st.lists(texts, min_size=1, max_size=12), asked=st.integers(1, 24))
def test_no_leaf_goes_that_was_used_after_one_that_stays(inserted: list[str], asked: int) -> None:
    cache = RadixCache(1000)
    for text in inserted:
        insert(cache, text)
    leaves = [node for node in cache.nodes() if not node.children]
    pages = len(list(cache.contents()))
    cache.take_events()
    assert cache.make_room(cache.free + asked) == (asked <= pages)
    left = set(cache.contents())
    assert pages - len(left) >= min(asked, pages)
    stayed = [leaf.last_use for leaf in leaves if leaf.hashes[0] in left]
    went = [leaf.last_use for leaf in leaves if leaf.hashes[0] not in left]
    assert went
    assert not stayed or max(went) < min(stayed)


def test_of_two_that_one_insertion_touched_the_new_one_is_younger() -> None:
    cache = RadixCache(8)
    insert(cache, "ba")
    insert(cache, "bb")
    cache.take_events()
    cache.make_room(cache.free + 1)
    assert told(cache, "ba") == [("removed", "ba")]
