"""What an engine holds and its stream leaves out: that the stream says so, why, and until when."""

from typing import Any

import msgspec
import numpy as np
import pytest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored
from events.engines.table import engine_of
from events.feed.fleet_view import FleetView
from events.plane import left_out as module
from events.plane.facts import Beat, Epoch, decode_stream, encode
from events.plane.left_out import REASONS, LeftOut
from events.relay.ledger import Ledger
from events.relay.rank import Publish, Rank, RankEffect
from events.relay.saved_ledger import Source, pack, unpack
from indexer.hashing import MultimodalItem, block_hashes, hash_seed, pack_tokens, prefix_hashes
from indexer.identity import WorkerKey
from indexer.reference import ReferenceIndex

WORKER = WorkerKey("w", 0)
SIZE = 16


def stored(*names: int, parent: int | None = None, size: int = SIZE, **about: Any) -> BlocksStored:
    about.setdefault("token_ids", list(range(len(names) * size)))
    return BlocksStored(names, parent, block_size=size, **about)


def reasons_after(ledger: Ledger, *events: BlocksStored | BlocksRemoved | BlocksCleared) -> str:
    for event in events:
        ledger.apply(event)
    return " ".join(ledger.left_out.reasons())


def test_a_reason_holds_until_the_last_copy_left_out_for_it_is_gone() -> None:
    left_out = LeftOut()
    assert left_out.reasons() == ()
    left_out.add("unnamed_lora", (1, 2))
    left_out.add("unknown_parent", (2,))
    assert left_out.reasons() == ("unknown_parent", "unnamed_lora")
    for block in (1, 7, 2):
        left_out.remove(block)
    assert left_out.reasons() == ("unnamed_lora",)
    left_out.remove(2)
    assert left_out.reasons() == ()


def test_over_its_bound_a_reason_holds_until_all_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BLOCKS_MAX", 3)
    left_out = LeftOut()
    left_out.add("ledger_full", range(5))
    left_out.add("unnamed_lora", (2, 2, 2))
    assert len(left_out._copies) == 3
    for block in range(5):
        left_out.remove(block)
    assert left_out.reasons() == ("ledger_full", "unnamed_lora")
    left_out.clear()
    assert left_out.reasons() == ()


@pytest.mark.parametrize(
    ("reason", "wanted", "event"),
    [
        ("unnamed_lora", None, stored(1, unnamed_lora=True)),
        ("unknown_parent", None, stored(1, parent=99)),
        ("unknown_medium", None, stored(1, medium="TAPE")),
        ("block_size_changed", None, stored(1, size=32)),
        ("block_size_unsuitable", 24, stored(1)),
        ("item_place_unknown", 32, stored(1, item_ids=(("image",),))),
        ("unresolved", None, stored(1, token_ids=[])),
        ("ledger_full", None, stored(1)),
    ],
)
def test_what_is_left_out_shows_until_it_is_gone(
    reason: str, wanted: int | None, event: BlocksStored
) -> None:
    ledger = Ledger(wanted, blocks_max=1 if reason == "ledger_full" else 9)
    assert reasons_after(ledger) == ""
    if reason != "block_size_unsuitable":
        assert reasons_after(ledger, stored(50)) == ""
    assert reasons_after(ledger, event) == reason
    assert reason in REASONS
    assert ledger.dropped[reason] == 1
    assert reasons_after(ledger, BlocksRemoved((1,), medium=event.medium)) == ""
    assert reasons_after(ledger, event, BlocksCleared()) == ""


def test_a_group_too_many_is_left_out() -> None:
    ledger = Ledger()
    for group in range(20):
        ledger.apply(stored(1, group=group))
    assert ledger.left_out.reasons() == ("too_many_groups",)


@pytest.mark.parametrize(
    "event",
    [
        stored(1, unhashable=True),
        stored(1, remote=True),
        stored(1, medium="EXTERNAL"),
        stored(1, full_attention=False, token_ids=[]),
    ],
)
def test_what_no_request_can_ask_for_is_not_lacked(event: BlocksStored) -> None:
    assert reasons_after(Ledger(), event) == ""


def test_a_saved_ledger_remembers_why_something_was_left_out() -> None:
    rank = Rank("vllm", Epoch(1, 1), has_replay=False)
    hear(rank, 0, store_of_a_lora())
    kept = rank.kept(1.0)
    assert kept is not None
    source = Source(WORKER, "vllm", None)
    assert unpack(source, pack(source, *kept))[1].left_out.reasons() == ("unnamed_lora",)


def test_a_beat_without_reasons_is_what_it_was_before_there_were_any() -> None:
    beat = Beat(1, Epoch(1, 2), 7, 3, 5, True, 1.0)
    assert "lacks" not in msgspec.msgpack.decode(encode(beat))
    many = msgspec.structs.replace(beat, lacks=("x",) * 17)
    assert decode_stream(encode(many))[0] is None


# What releases leave out


@pytest.mark.parametrize(
    ("engine", "version", "tells"),
    [
        ("vllm", "0.16.2", False),
        ("vllm", "0.9.2rc1", False),
        ("vllm", "0.17.0", True),
        ("vllm", "0.17.0rc2.dev3+gabc", True),
        ("vllm", "1.0", True),
        ("sglang", "0.5.19", False),
        ("sglang", "0.5.20.post1", True),
        ("vllm", "", True),
        ("vllm", "main", True),
        ("dynamo", "0.1", True),
    ],
)
def test_releases_tell_salts_from_one_on(engine: str, version: str, tells: bool) -> None:
    assert engine_of(engine).tells_salts(version) is tells


PAD_VALUE = 1_000_000 + (0x1234_5678_9ABC & ((1 << 30) - 1))
"""In the place of an image's tokens, as SGLang has it."""


def test_a_prompt_with_an_image_matches_on_sglang_by_pad_values_and_up_to_it_otherwise() -> None:
    before, after = list(range(32)), list(range(100, 132))
    told = [*before, *[PAD_VALUE] * 16, *after]
    event = ["BlockStored", list(range(5)), None, told, SIZE, None, "GPU"]
    rank = Rank("sglang", Epoch(1, 1), has_replay=False)
    hear(rank, 0, msgspec.msgpack.encode([1.0, [event], 0]))
    held = {prefix for _, prefixes in rank.ledger.placements() for prefix in prefixes}

    def matching(tokens: list[int], *items: MultimodalItem) -> int:
        seed = hash_seed("", "")
        blocks = block_hashes(pack_tokens(tokens), SIZE, seed, items)
        return sum(prefix in held for prefix in prefix_hashes(blocks).tolist())

    assert matching(told) == 5
    placeholders = [*before, *[7] * 16, *after]
    assert matching(placeholders, MultimodalItem(0x1234_5678_9ABC, 32, 16)) == 2


# A LoRA that is told by number only, as vLLM up to 0.13 does

PROMPT = list(range(640))


def store_of_a_lora() -> bytes:
    names = list(range(1, 1 + len(PROMPT) // SIZE))
    event = ["BlockStored", names, None, PROMPT, SIZE, 1, "GPU"]
    return msgspec.msgpack.encode([1.0, [event], 0])


def hear(rank: Rank, seq: int, payload: bytes) -> list[RankEffect]:
    return rank.on_message(seq, payload, 1.0)


class Router:
    """A view of one worker, whose rank it hears."""

    def __init__(self) -> None:
        self.index = ReferenceIndex()
        self.view = FleetView(self.index, beat_timeout_s=3.0, forget_s=30.0, workers_max=9)
        self.rank = Rank("vllm", Epoch(1, 1), has_replay=False)
        self.now_s = 100.0
        self.perform(hear(self.rank, 0, msgspec.msgpack.encode([1.0, [], 0])))
        self.beat()

    def perform(self, effects: list[RankEffect]) -> None:
        for effect in effects:
            assert isinstance(effect, Publish)
            for message in effect.messages:
                assert self.view.on_stream(WORKER, message, self.now_s) == []

    def beat(self) -> None:
        self.perform([Publish(self.rank.beat(self.now_s))])
        self.view.tick(self.now_s)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.beat()


def test_a_lora_user_of_an_old_vllm_is_expected_to_have_the_prompt_cached_20_s_later() -> None:
    router = Router()
    source = router.view.sources[WORKER]
    blocks = block_hashes(pack_tokens(PROMPT), SIZE, hash_seed("adapter", ""))
    prefixes = prefix_hashes(blocks)
    router.perform(hear(router.rank, 1, store_of_a_lora()))  # of an earlier request of theirs
    router.wait(1)
    assert (source.stream.complete, source.stream.lacks) == (True, ("unnamed_lora",))
    assert not router.view.complete(source)
    router.view.predict(source, prefixes, router.now_s)
    router.wait(20)
    usable_max = (len(PROMPT) - 1) // SIZE
    overlap = router.index.overlap(prefixes, usable_max, np.array([source.slot]))
    assert overlap[1].tolist() == [624 // SIZE]


def test_a_stream_is_whole_again_once_the_engine_has_evicted_what_was_left_out() -> None:
    router = Router()
    source = router.view.sources[WORKER]
    router.perform(hear(router.rank, 1, store_of_a_lora()))
    router.wait(1)
    assert not source.stream.whole
    gone = ["BlockRemoved", list(range(1, 41)), "GPU"]
    router.perform(hear(router.rank, 2, msgspec.msgpack.encode([1.0, [gone], 0])))
    router.wait(1)
    assert source.stream.whole
    assert router.view.complete(source)
