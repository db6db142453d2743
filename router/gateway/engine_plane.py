"""Internal fields and headers that engines and routers use among each other (the engine plane).

Pure. Such fields name a prefill worker's address, blocks to read, the rank or instance that serves,
another adapter, a priority in the engine's queue: a client that sets them controls the fleet.

Laws:
- no header of the engine plane is passed on from a client to an engine;
- a client with a key may set fields of the plane only if its key has the right `engine_fields`.

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
"""Fields of the engine plane at a body's top level. A null field counts as absent."""
NESTED = "vllm_xargs"
NESTED_FIELDS = frozenset((*FIELDS, "kv_cache_report_mode"))
"""Fields of the engine plane inside vLLM's object vllm_xargs, in which vLLM itself keeps
kv_transfer_params. kv_cache_report_mode changes the KV events that the index is made of."""
ADAPTER = "lora_path"
"""Field of SGLang: the LoRA adapter to use, or a list with one for each prompt."""

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
"""Names of the engine plane's headers, in lower case."""
HEADERS_PREFIX = "x-override-"
"""Prefix of SGLang's headers, each of which sets a field of the engine plane."""


def is_of_plane(header: str) -> bool:
    """Whether a header, in lower case, is internal to engines and routers."""
    return header in HEADERS or header.startswith(HEADERS_PREFIX)


def of_plane(headers: Iterable[str]) -> list[str]:
    """Those of the header names, in lower case, that are internal to engines and routers."""
    return [name for name in headers if is_of_plane(name)]
