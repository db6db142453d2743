"""Internal fields and headers that engines and routers use among each other (the engine plane).

Pure. A prefill worker's address, blocks to read, the rank or the instance that serves, another
adapter, a rank in the engine's queue: a caller that names these acts for the fleet.

Laws:
- no client's header of the plane goes on to an engine;
- a client with a key names no field of the plane, unless its key has the right `engine_fields`.

Source: the request schemas of vLLM 0.32 and SGLang 0.5.23, NvExt of Dynamo 1.6, llm-d's sidecar.
"""

from collections.abc import Iterable

FIELDS = (
    "kv_transfer_params",  # vLLM: blocks and the address that they are read from
    "ec_transfer_params",  # vLLM: the same for encoders' outputs
    "bootstrap_host",  # SGLang: the address that the decode worker connects to
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",  # SGLang: the rank that serves
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "session_params",  # SGLang: goes on from the tokens of any session
    "custom_logit_processor",  # SGLang: pickled code
    "nvext",  # Dynamo: instances, ranks, tokens and priorities
)
"""Fields of a body's top level. Null is absent, as for the engines."""
NESTED = "vllm_xargs"
NESTED_FIELDS = frozenset((*FIELDS, "kv_cache_report_mode"))
"""Fields of vLLM's NESTED, into which it puts kv_transfer_params itself. kv_cache_report_mode
changes the events by which routers know the engine's cache."""
ADAPTER = "lora_path"
"""Field of SGLang: the adapter, or one for each prompt, in the place of the model's."""

HEADERS = frozenset((
    "x-data-parallel-rank",  # vLLM, SGLang, Dynamo
    "x-vllm-priority",
    "x-dynamo-worker-instance-id", "x-dynamo-prefill-instance-id", "x-dynamo-dp-rank",
    "x-dynamo-prefill-dp-rank", "x-dynamo-request-priority", "x-dynamo-request-strict-priority",
    "x-dynamo-routing-mode",
    "x-worker-instance-id", "x-prefill-instance-id", "x-dp-rank", "x-prefill-dp-rank",
    "x-prefiller-host-port", "x-prefiller-url", "x-encoder-hosts-ports",  # llm-d's sidecar
    "x-data-parallel-host-port",
))  # fmt: skip
"""Headers of the plane, in lower case."""
HEADERS_PREFIX = "x-override-"
"""Prefix of SGLang's headers, one for each field."""


def is_of_plane(header: str) -> bool:
    """Whether a header, in lower case, is internal to engines and routers."""
    return header in HEADERS or header.startswith(HEADERS_PREFIX)


def of_plane(headers: Iterable[str]) -> list[str]:
    """The internal headers among these; all names in lower case."""
    return [name for name in headers if is_of_plane(name)]
