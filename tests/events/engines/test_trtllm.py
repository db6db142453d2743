"""TensorRT-LLM's events and pages, as its sources write them; no engine of it was run."""

import msgspec
import pytest

from events.engines.events import BlocksCleared, BlocksRemoved, BlocksStored, LoadSample
from events.engines.pages.load import LoadUnreadable
from events.engines.table import READINGS, engine_of
from events.engines.trtllm.pages import trtllm_identity, trtllm_loads
from tests.events.engines.encoded import complaint, encode, only, removed, stored

DECODE = READINGS["trtllm"].decode
PAGE = """# HELP trtllm_num_requests_running Number of active requests
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m",pid="7"} 3.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m",pid="7"} 2.0
trtllm_max_num_active_requests{engine_type="trtllm",model_name="m",pid="7"} 64.0
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m",pid="7"} 1000.0
trtllm_kv_cache_used_blocks{engine_type="trtllm",model_name="m",pid="7"} 250.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m",pid="7"} 32.0
trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="m",pid="7"} 0.5
"""


class MultimodalKey(msgspec.Struct, omit_defaults=True, tag="mm_key"):
    hash: str
    start_offset: int
    uuid: str | None = None


def test_a_store_is_read_whole() -> None:
    keys = [[MultimodalKey("ab" * 32, 1), MultimodalKey("cd" * 32, 3, "mine")], []]
    assert only(DECODE(encode(stored(parent_block_hash=9, mm_keys=keys)))) == BlocksStored(
        hashes=(11, 12),
        parent=9,
        token_ids=only(DECODE(encode(stored()))).token_ids,
        block_size=4,
        medium="GPU",
        item_ids=(("ab" * 32, "mine"), ()),
    )
    assert only(DECODE(encode(stored(mm_keys=[[], []])))).item_ids is None


def test_a_removal_and_a_clearing_are_read() -> None:
    assert only(DECODE(encode(removed()))) == BlocksRemoved((11, 12), "GPU")
    assert only(DECODE(encode({"type": "AllBlocksCleared"}))) == BlocksCleared()


def test_a_lora_has_a_number_alone_so_that_its_blocks_match_no_request() -> None:
    assert only(DECODE(encode(stored(lora_id=0)))).unnamed_lora
    assert not only(DECODE(encode(stored()))).unnamed_lora


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mm_keys": [[]]}, "mm_keys has 1 entries for 2 blocks"),
        ({"token_ids": [1, 2, 3, "digest", 5, 6, 7, 8]}, "token_ids"),
        ({"token_ids": [1]}, "tokens do not fill"),
    ],
)
def test_what_can_not_be_hashed_is_left_out(changes: dict[str, object], why: str) -> None:
    assert why in complaint(DECODE(encode(stored(**changes))))


def test_its_events_tell_no_salts_in_any_release() -> None:
    engine = engine_of("trtllm")
    assert not engine.tells_salts("1.3.0")
    assert not engine.tells_salts("")
    assert engine.hand_over is None


def test_its_page_has_the_load_in_blocks() -> None:
    assert trtllm_loads(PAGE) == {
        0: LoadSample(
            running=3,
            waiting=2,
            used_blocks=250.0,
            total_blocks=1000,
            block_size=32,
            total_slots=64,
            model="m",
            numbers={"cache_hit_rate": 0.5},
        )
    }
    (page,) = READINGS["trtllm"].load_pages
    assert page.read(PAGE.encode(), None) == trtllm_loads(PAGE)


@pytest.mark.parametrize("name", ["trtllm_num_requests_running", "trtllm_num_requests_waiting"])
def test_a_page_without_its_queues_is_unreadable(name: str) -> None:
    with pytest.raises(LoadUnreadable, match=f"lacks {name}"):
        trtllm_loads(PAGE.replace(name, "other"))


def test_its_identity_needs_its_models_alone() -> None:
    models = '{"object": "list", "data": [{"id": "m", "owned_by": "tensorrt_llm"}]}'
    identity = trtllm_identity(models, '{"version": "1.3.0rc21"}')
    assert (identity.model, identity.version) == ("m", "1.3.0rc21")
    assert trtllm_identity(models).version is None
    assert trtllm_identity(models, "no JSON").troubles
