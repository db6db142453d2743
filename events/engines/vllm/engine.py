"""vLLM's record."""

from events.engines.engine import Engine, HandOver, IdentityPage, LoadPage, Loads, Reading
from events.engines.vllm.events import decode
from events.engines.vllm.pages import vllm_identity, vllm_loads


def _loads(page: bytes, _block_size: int | None) -> Loads:
    return vllm_loads(page.decode("utf-8", "replace"))


VLLM = Engine(
    name="vllm",
    title="vLLM",
    reading=Reading(
        decode=decode,
        identity_pages=(
            IdentityPage("/v1/models", required=True, changes=True),
            IdentityPage("/version"),
            IdentityPage("/kv_event_sources"),
            # In development mode only. The first answer inspects the whole machine and may come
            # too late; the engine keeps the result for later answers.
            IdentityPage("/server_info?config_format=json"),
        ),
        read_identity=vllm_identity,
        load_pages=(LoadPage("/metrics", _loads),),
        rank_label="engine",
    ),
    owned_by="vllm",
    first_version=(0, 9),
    # `extra_keys` of BlockStored. Source: the wheels of 0.9.2 to 0.32.0.
    salts_since=(0, 17),
    lower_priority_first=True,
    hand_over=HandOver.IN_TURN,
    # 0.32; made for decode workers of pairs. Releases that don't know it render the messages.
    chat_tokens=lambda token_ids: {"kv_transfer_params": {"prompt_token_ids": token_ids}},
)
