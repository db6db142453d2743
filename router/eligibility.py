"""Why a worker that is up can't take a request."""

from collections.abc import Container

from events.facts import Heartbeat
from events.view import Source
from router.decision import Request, Role
from router.pools import Pool, heartbeat_of

DRAINED = "drained"
TOO_LONG = "prompt too long"
OUTPUT_TOKENS_MAX = 4096
"""What a request is believed when it says how much output it expects."""


def exclusions(
    request: Request, output_tokens: int, pool: Pool, drained: Container[str]
) -> list[str]:
    """A reason for each worker that can't, empty where it can.

    output_tokens: what the request is expected to bring out. drained: worker ids.
    """
    return [exclusion(request, output_tokens, source, drained) for source in pool.sources]


def takes_all(request: Request, output_tokens: int, pool: Pool, any_drained: bool) -> bool:
    """Whether nobody has to be asked one by one, as is the case for most requests."""
    prompt = request.prompt
    return not (
        any_drained
        or request.excluded_workers
        or request.allowed_workers
        or request.required_labels
        or prompt.lora_name
        or prompt.token_count + output_tokens > pool.shortest_len
        or not pool.roles <= {request.role, Role.BOTH}
        or (prompt.hashes_block_size and pool.block_sizes != {prompt.hashes_block_size})
    )


def too_long(request: Request, output_tokens: int, heartbeat: Heartbeat) -> bool:
    """Whether prompt and expected output go beyond what the engine takes."""
    tokens = request.prompt.token_count + output_tokens
    return heartbeat.max_model_len > 0 and tokens > heartbeat.max_model_len


def exclusion(request: Request, output_tokens: int, source: Source, drained: Container[str]) -> str:
    """Why this worker can't; empty when it can."""
    heartbeat = heartbeat_of(source)
    worker_id = source.key.worker_id
    prompt = request.prompt
    if worker_id in drained:
        return DRAINED
    if worker_id in request.excluded_workers:
        return "excluded by the request"
    if request.allowed_workers and worker_id not in request.allowed_workers:
        return "not among the allowed"
    if heartbeat.role not in (request.role, Role.BOTH):
        return f"role is {heartbeat.role}"
    for name, value in request.required_labels.items():
        if heartbeat.labels.get(name) != value:
            return "labels differ"
    loras = heartbeat.lora_names  # an engine that lists none may load them as they come
    if prompt.lora_name and loras and prompt.lora_name not in loras:
        return "LoRA not loaded"
    if too_long(request, output_tokens, heartbeat):
        return TOO_LONG
    if prompt.hashes_block_size and prompt.hashes_block_size != heartbeat.block_size:
        return "block size differs"
    return ""
