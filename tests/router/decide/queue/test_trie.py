"""dfs-weight: prompts that share prefixes go together."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from indexer.hashing import HashArray
from router.decide.queue_order.trie import depth_first
from router.decide.waiter import Waiter


def chain_of(blocks: str) -> HashArray:
    """PrefixHashes of a prompt of one block a letter."""
    hashes = [xxh3_64_intdigest(blocks[: end + 1].encode()) for end in range(len(blocks))]
    return np.array(hashes, np.uint64)


def waiters_of(*prompts: str) -> list[Waiter]:
    return [Waiter(prompt, 0.0, prefixes=chain_of(prompt)) for prompt in prompts]


def walk(*prompts: str) -> list[str]:
    return [prompts[number] for number in depth_first(waiters_of(*prompts))]


def test_the_worked_example_of_sglang() -> None:
    """A-C four times, A-D twice, B-E-F twice, B-E-G twice come out as C4 D2 F2 G2."""
    prompts = ["BEG", "AD", "AC", "BEF", "AC", "AC", "BEG", "AD", "BEF", "AC"]
    order = walk(*prompts)
    assert order == ["AC"] * 4 + ["AD"] * 2 + ["BEG"] * 2 + ["BEF"] * 2
    prompts.sort()  # F before G
    assert walk(*prompts) == ["AC"] * 4 + ["AD"] * 2 + ["BEF"] * 2 + ["BEG"] * 2


def test_a_nodes_own_requests_go_after_its_children() -> None:
    assert walk("A", "AB", "ABC", "A") == ["ABC", "AB", "A", "A"]


def test_equal_requests_and_equal_branches_go_in_the_order_of_arrival() -> None:
    assert depth_first(waiters_of("B", "A", "A", "B")) == [0, 3, 1, 2]


def test_requests_without_known_blocks_come_last() -> None:
    waiters = [Waiter("a", 0.0), *waiters_of("", "X")]
    assert depth_first(waiters) == [2, 0, 1]
    assert depth_first([]) == []


def naive(prompts: list[str]) -> list[int]:
    """The same, by grouping block after block."""

    def of(numbers: list[int], depth: int) -> list[int]:
        groups: dict[str, list[int]] = {}
        own = []
        for number in numbers:
            if len(prompts[number]) == depth:
                own.append(number)
            else:
                groups.setdefault(prompts[number][depth], []).append(number)
        found = []
        for group in sorted(groups.values(), key=lambda group: (-len(group), group[0])):
            found += of(group, depth + 1)
        return found + own

    return of(list(range(len(prompts))), 0)


@settings(max_examples=100)
@given(prompts=st.lists(st.text("ab", max_size=7), max_size=12))
def test_the_compressed_trie_walks_as_the_plain_one(prompts: list[str]) -> None:
    assert depth_first(waiters_of(*prompts)) == naive(prompts)
