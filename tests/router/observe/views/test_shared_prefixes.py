"""The tree of shared prefixes: what prompts share, where they part, and the holders."""

import random

from indexer.hashing import pack_tokens
from router.observe.views.shared_prefixes import (
    NODES_MAX,
    PROMPTS_MAX,
    Holder,
    Node,
    SharedPrefixes,
    Tree,
)
from router.request.prompt import Prompt
from tests.stage.fleet import Fleet

SYSTEM = list(range(160))


def of(*parts: list[int]) -> Prompt:
    return Prompt.from_tokens(pack_tokens([token for part in parts for token in part]))


def some(seed: int, count: int = 64) -> list[int]:
    return [random.Random(seed).randrange(1000, 9000) for _ in range(count)]


def sample(fleet: Fleet, prefixes: SharedPrefixes, prompt: Prompt) -> None:
    fleet.core.route(fleet.request(prompt), fleet.now_s, watch=prefixes.watch)


def grown(fleet: Fleet, prefixes: SharedPrefixes) -> Tree:
    """All steps of a tree."""
    steps = prefixes.tree(fleet.core)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            tree: Tree = end.value
            return tree


def test_prompts_that_share_a_beginning_make_a_node_and_part_below_it() -> None:
    fleet, prefixes = Fleet(), SharedPrefixes()
    holder = fleet.add("holder")
    fleet.add("other")
    fleet.cache(holder, of(SYSTEM))
    document = list(range(5000, 5080))
    for seed in range(3):
        sample(fleet, prefixes, of(SYSTEM, document, some(seed)))
    sample(fleet, prefixes, of(SYSTEM, some(7)))
    sample(fleet, prefixes, of(some(8)))
    tree = grown(fleet, prefixes)
    assert tree.prompts == 5
    (root,) = tree.roots
    assert (root.tokens, root.prompts) == (160, 4)
    assert root.holders[0].share == 1.0
    assert "holder" in {holder.worker_id for holder in root.holders}
    (below,) = root.children
    assert (below.tokens, below.prompts) == (240, 3)
    assert all(0 < holder.share <= 1 for holder in below.holders)
    assert not below.children


def test_holders_of_a_beginning_have_its_share() -> None:
    fleet, prefixes = Fleet(), SharedPrefixes()
    key = fleet.add("half")
    whole = of(SYSTEM)
    for _ in range(2):
        decision = fleet.core.decide(fleet.request(whole), fleet.now_s)
        prefixes.watch(decision)
    assert grown(fleet, prefixes).roots[0].holders == []
    fleet.cache(key, whole, 80)
    assert grown(fleet, prefixes).roots[0].holders == [Holder("half", 0, 0.5)]


def test_equal_prompts_are_one_node_of_their_whole_length() -> None:
    fleet, prefixes = Fleet(), SharedPrefixes()
    fleet.add("a")
    for _ in range(4):
        sample(fleet, prefixes, of(SYSTEM))
    (root,) = grown(fleet, prefixes).roots
    assert (root.tokens, root.prompts, root.children) == (160, 4, [])


def test_a_tree_is_bounded_in_prompts_and_nodes() -> None:
    fleet, prefixes = Fleet(), SharedPrefixes()
    fleet.add("a", total_blocks=None, total_slots=None)
    for seed in range(PROMPTS_MAX):
        sample(fleet, prefixes, of(some(seed, 32)))
        sample(fleet, prefixes, of(some(seed, 32), some(seed + 1, 16)))
    assert len(prefixes) == PROMPTS_MAX
    tree = grown(fleet, prefixes)

    def count(nodes: list[Node]) -> int:
        return sum(1 + count(node.children) for node in nodes)

    assert count(tree.roots) == NODES_MAX


def test_without_samples_there_is_no_tree() -> None:
    fleet = Fleet()
    tree = grown(fleet, SharedPrefixes())
    assert (tree.prompts, tree.roots) == (0, [])
