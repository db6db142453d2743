"""TensorRT-LLM's record."""

from events.engines.engine import Engine, IdentityPage, LoadPage, Loads, Reading
from events.engines.trtllm.events import decode
from events.engines.trtllm.pages import trtllm_identity, trtllm_loads


def _loads(page: bytes, _block_size: int | None) -> Loads:
    return trtllm_loads(page.decode("utf-8", "replace"))


TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    reading=Reading(
        decode=decode,
        identity_pages=(
            IdentityPage("/v1/models", required=True, changes=True),
            IdentityPage("/version"),
        ),
        read_identity=trtllm_identity,
        load_pages=(LoadPage("/prometheus/metrics", _loads),),
        metrics_path="/prometheus/metrics",
    ),
    owned_by="tensorrt_llm",
    first_version=(1, 3),  # the first with streamed events; none has been run yet
    salts_since=None,
)
