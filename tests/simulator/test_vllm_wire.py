"""Byte for byte what vLLM 0.32.0 sent: messages 1, 7, 10, 21 and 113 of a recorded engine."""

from typing import Any

import msgspec
import pytest

from events.engines.events import BlocksRemoved, BlocksStored
from events.engines.vllm.events import decode
from indexer.identity import Tier
from simulator.engines.block_pool import Cleared, PoolEvent, Removed, Stored
from simulator.engines.vllm_wire import END_OF_REPLAY, encode_batch, encode_sequence

RECORDED = {
    "one_block_after_its_parent": """
        93cb41dac03efd8eab6d918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf
        4921607f81d4951fb1706172656e745f626c6f636b5f68617368cfd47199dd475fdc78a9746f6b656e5f6964
        73dc0020ccfd12ccf319cca0cccc5a5977096979ccd2ccb3ccb7cceecc8c05ccc7456cccdd1fccf9ccbd69cc
        d6ccfbccb9ccd7ccb403aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c
        6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f73
        7065635f6b696e64ae66756c6c5f617474656e74696f6e00
    """,
    "salted_chain": """
        93cb41dac03efe102fad918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cf
        f5863bfdea3144aecfc079dd627a037888cf168fef748bc93c3fb1706172656e745f626c6f636b5f68617368
        c0a9746f6b656e5f696473dc00604723cc853fcd0100cce9ccf4ccc56e33ccfc11cccacce004cce7cc8b7837
        cca5120e1007ccc671ccdb1174cce3cd01007accb37973cceecc970eccd83662cc9a40ccadccdb64cc9ecc94
        cd0102cccc14ccf87fccd1ccd75bccbeccc22fcce33a56ccccccc0ccfd12ccf319cca0cccc5a5977096979cc
        d2ccb3ccb7cceecc8c05ccc7456cccdd1fccf9ccbd69ccd6ccfbccb9ccd7ccb403aa626c6f636b5f73697a65
        20a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797393
        91a874656e616e742d61c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66
        756c6c5f617474656e74696f6e00
    """,
    "session": """
        93cb41dac03efe44e3d3918ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf
        062dba3feeba7a77cf480d29326f83dfddb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69
        6473dc004068cc81ccbb2ccc9230cce831ccb077cccacca018ccaa62cca5cc9ecc80ccae3632cc80730d7fcc
        d028cc8c27290e08cc97ccbaccffccf35136ccaa2a5b5e4f4bcca6cc9f39cc99436c4b13cca46c5ecc9ccce0
        531bcc81cc8423cce7ccdfaa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a9
        6c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f6361636865
        5f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a6736573732d3100
    """,
    "removed": """
        93cb41dac03efef0fe759184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391
        cf4fe06c0d810bd9aba66d656469756da3475055a967726f75705f6964780000
    """,
    "cleared_before_stored": """
        93cb41dac03f00ec47469281a474797065b0416c6c426c6f636b73436c65617265648ba474797065ab426c6f
        636b53746f726564ac626c6f636b5f68617368657393cf4fe06c0d810bd9abcfd47199dd475fdc78cf492160
        7f81d4951fb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00604723cc853fcd01
        00cce9ccf4ccc56e33ccfc11cccacce004cce7cc8b7837cca5120e1007ccc671ccdb1174cce3cd01007accb3
        7973cceecc970eccd83662cc9a40ccadccdb64cc9ecc94cd0102cccc14ccf87fccd1ccd75bccbeccc22fcce3
        3a56ccccccc0ccfd12ccf319cca0cccc5a5977096979ccd2ccb3ccb7cceecc8c05ccc7456cccdd1fccf9ccbd
        69ccd6ccfbccb9ccd7ccb403aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055
        a96c6f72615f6e616d65c0aa65787472615f6b65797393c0c0c0a967726f75705f69647800b26b765f636163
        68655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00
    """,
}


def _event(told: dict[str, Any]) -> PoolEvent:
    match told["type"]:
        case "BlockStored":
            return Stored(
                hashes=tuple(told["block_hashes"]),
                parent=told["parent_block_hash"],
                token_ids=tuple(told["token_ids"]),
                extra_keys=tuple(keys and tuple(keys) for keys in told["extra_keys"]),
                lora_name=told["lora_name"],
                lora_id=told["lora_id"],
                session_id=told.get("session_id"),
            )
        case "BlockRemoved":
            return Removed(tuple(told["block_hashes"]))
        case _:
            return Cleared()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_message_is_written_in_its_very_bytes(name: str) -> None:
    recorded = bytes.fromhex("".join(RECORDED[name].split()))
    unix_s, events, rank = msgspec.msgpack.decode(recorded)
    assert encode_batch(unix_s, map(_event, events), 32, rank) == recorded


def test_a_lora_is_told_by_number_and_name_and_in_every_blocks_keys() -> None:
    told = Stored((1, 2), None, (5, 6), (("ad", "salt"), ("ad",)), lora_name="ad", lora_id=1)
    _, [event], rank = msgspec.msgpack.decode(encode_batch(0.0, [told], 1))
    assert list(event) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
        "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    ]  # fmt: skip
    assert event["lora_id"] == 1
    assert event["lora_name"] == "ad"
    assert event["extra_keys"] == [["ad", "salt"], ["ad"]]
    assert rank == 0


def test_sequence_numbers_are_eight_bytes_big_endian() -> None:
    assert encode_sequence(258) == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert END_OF_REPLAY == b"\xff" * 8


def test_each_evicted_block_is_told_in_an_event_of_its_own() -> None:
    _, events, _ = msgspec.msgpack.decode(encode_batch(0.0, [Removed((1, 2))], 1))
    assert [event["block_hashes"] for event in events] == [[1], [2]]


def test_the_host_tier_is_told_as_the_offloading_connector_does() -> None:
    told = Stored((1, 2), 9, (5, 6), (None, None), tier=Tier.HOST)
    gone = Removed((3, 4), tier=Tier.HOST)
    batch = decode(encode_batch(0.0, [told, gone], 1))
    first, second, removed = batch.events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert (first.hashes, second.hashes, removed.hashes) == ((1,), (2,), (3, 4))
    assert (first.medium, first.parent, len(first.token_ids)) == ("CPU", None, 0)
    assert removed.medium == "CPU"
