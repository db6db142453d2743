"""SGLang's record."""

from events.engines.engine import Engine, HandOver, IdentityPage, LoadPage, Loads, Reading
from events.engines.sglang.events import decode
from events.engines.sglang.pages import (
    sglang_identity,
    sglang_load_stat,
    sglang_loads,
    sglang_metrics,
)


def _loads(page: bytes, block_size: int | None) -> Loads:
    return sglang_loads(page, block_size or 1)


def _metrics(page: bytes, block_size: int | None) -> Loads:
    return sglang_metrics(page.decode("utf-8", "replace"), block_size)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    reading=Reading(
        decode=decode,
        identity_pages=(
            IdentityPage("/server_info", required=True),
            IdentityPage("/v1/models", changes=True),
            IdentityPage("/model_info"),
        ),
        read_identity=sglang_identity,
        load_pages=(
            LoadPage("/v1/loads?include=core", _loads),
            LoadPage("/metrics", _metrics),  # of older releases; its values are older, too
        ),
        loads_need_identity=True,
        read_load_feed=sglang_load_stat,
    ),
    owned_by="sglang",
    first_version=(0, 4, 6),
    # `cache_salt` of BlockStored. Source: the wheels of 0.4.6.post5 to 0.5.23.
    salts_since=(0, 5, 20),
    names_items=False,
    ranks_numbered=False,  # without DP attention every rank has number 0
    lora_field="lora_path",
    hand_over=HandOver.AT_ONCE,
    decode_caches=False,  # unless a flag says so
    # 0.5.23 drops bootstrap_room from messages (sgl-project/sglang#35229).
    unpaired_bodies=frozenset({"messages"}),
    # 0.5.23. Releases that don't know it render the messages.
    chat_tokens=lambda token_ids: {"input_ids": token_ids},
)
