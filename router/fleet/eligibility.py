"""Why a worker that is up can't take a request."""

from collections.abc import Container, Sequence

from events.feed.fleet_view import Source
from events.plane.facts import Heartbeat
from router.fleet.pools import Pool, heartbeat_of
from router.request.request import Request, Role

DRAINED = "drained"
TOO_LONG = "prompt too long"
NOT_A_NUMBER = "cost is not a number"
"""The policy's doing, which another one may not do."""
LORA_ELSEWHERE = "another worker has the LoRA loaded"
OUTPUT_TOKENS_MAX = 4096
"""Largest expected output of a request that counts, in tokens."""


def exclusions(
    request: Request, output_tokens: int, pool: Pool, drained: Container[str]
) -> list[str]:
    """A reason for each worker that can't, empty where it can.

    output_tokens: what the request is expected to bring out. drained: worker ids.
    """
    return [exclusion(request, output_tokens, source, drained) for source in pool.sources]


def answering_first(reasons: Sequence[str], last: Sequence[str]) -> Sequence[str]:
    """Reasons against workers; those of the last resort have theirs, too, if any other may be
    picked, or could if it had room. last: see Matched."""
    if not any(last):
        return reasons
    pairs = list(zip(reasons, last, strict=True))
    if any(not reason and not kept_out for reason, kept_out in pairs):
        return [reason or kept_out for reason, kept_out in pairs]
    return reasons


def loaded_first(
    reasons: Sequence[str], lora_name: str, pool: Pool, full: Sequence[float]
) -> Sequence[str]:
    """Reasons against workers; those that would have to load the LoRA have theirs, too, while a
    worker that lists it may be picked and has room: each load costs time, and room for another LoRA
    that is in use there."""
    lists = [lora_name in heartbeat_of(source).lora_names for source in pool.sources]
    if not any(
        listed and not reason and not is_full
        for listed, reason, is_full in zip(lists, reasons, full, strict=True)
    ):
        return reasons
    return [
        reason or (LORA_ELSEWHERE if would_load(heartbeat_of(source), lora_name) else "")
        for reason, source in zip(reasons, pool.sources, strict=True)
    ]


def would_load(heartbeat: Heartbeat, lora_name: str) -> bool:
    """Whether an engine has to load a LoRA for a request, and does so on demand."""
    return heartbeat.loads_loras and lora_name not in heartbeat.lora_names


def only_roles(pool: Pool, role: Role) -> tuple[str, ...]:
    """As `exclusions`, of a request that goes by roles alone."""
    return tuple(_not_of_role(heartbeat_of(source), role) for source in pool.sources)


def narrows_nothing(request: Request, output_tokens: int, pool: Pool, any_drained: bool) -> bool:
    """Whether all workers of its role can take a request, as is the case for most."""
    prompt = request.prompt
    return not (
        any_drained
        or request.excluded_workers
        or request.allowed_workers
        or request.required_labels
        or prompt.lora_name
        or prompt.token_count + output_tokens > pool.shortest_len
        or (prompt.only_block_size and pool.block_sizes != {prompt.only_block_size})
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
    if reason := _not_of_role(heartbeat, request.role):
        return reason
    for name, value in request.required_labels.items():
        if heartbeat.labels.get(name) != value:
            return "labels differ"
    if prompt.lora_name and not _may_serve(heartbeat, prompt.lora_name):
        return "LoRA not loaded"
    if too_long(request, output_tokens, heartbeat):
        return TOO_LONG
    if prompt.only_block_size and prompt.only_block_size != heartbeat.block_size:
        return "block size differs"
    return ""


def _may_serve(heartbeat: Heartbeat, lora_name: str) -> bool:
    """Whether an engine has a LoRA, or may load it; an engine that lists none may."""
    loras = heartbeat.lora_names
    return not loras or lora_name in loras or would_load(heartbeat, lora_name)


def _not_of_role(heartbeat: Heartbeat, role: Role) -> str:
    return "" if heartbeat.role in (role, Role.BOTH) else f"role is {heartbeat.role}"
