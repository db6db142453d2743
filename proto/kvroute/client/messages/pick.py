"""Pick, the answer of route(): a worker, its reservation, and the reasons."""

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from kvroute.client.errors import UnusableAnswer, unreachable
from kvroute.client.messages.tokens import unpack_tokens
from kvroute.v1 import PromptSource, Receipt, RouteResponse, router_pb2

HAND_OVER_DEPTH_MAX = 32
"""Levels of objects and lists in a hand-over, at most; vLLM's connectors have 3."""
_INTS = range(-(1 << 63), 1 << 64)
ONE_TOKEN: Mapping[str, Any] = {
    "n": 1,
    "best_of": None,
    "use_beam_search": False,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "stop_sequences": None,
    "ignore_eos": True,
    "stream": False,
    "stream_options": None,
}
"""Fields of a prefill worker's request: one answer of one token, which only its length ends. vLLM's
connectors hand over no blocks of a request that ends otherwise. vLLM refuses min_tokens above
max_tokens, and stream_options without stream; chats are bounded by max_completion_tokens."""
INSTANCE_LABEL = "kvroute.io/dynamo-instance"
"""Label of a worker behind Dynamo's frontend: the number by which the frontend knows it."""


@dataclass(frozen=True, slots=True)
class OverlapTokens:
    """The part of the prompt that the worker holds, in tokens."""

    raw: int
    """The longest run of leading blocks, on any tier."""
    usable: int
    """Tokens that the engine will reuse: device + host + disk + predicted."""
    device: int
    host: int
    disk: int
    predicted: int
    """Tokens of prompts that were sent to the worker or reused there, and are not in its events so
    far."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A worker to try next, should the pick fail."""

    worker_id: str
    dp_rank: int | None
    address: str
    cost: float


@dataclass(frozen=True, slots=True)
class PrefillWorker:
    """The prefill worker of a PREFILL_DECODE pair: computes the prompt; the picked worker decodes.

    With SGLang, both workers get their requests at once; with vLLM, the picked worker gets its
    request after the prefill worker has answered.
    """

    worker_id: str
    dp_rank: int | None
    address: str
    engine: str
    """Kind of the engine, such as vllm."""
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    """Number by which both workers match the request; unique among requests in flight."""
    new_tokens: int
    """Prompt tokens that this worker has yet to compute."""
    prefill_kv_transfer_params: Mapping[str, Any] | None = field(repr=False)
    decode_kv_transfer_params: Mapping[str, Any] | None = field(repr=False)
    """Parameters for the picked worker's request; None: it takes those of this worker's answer."""
    request_id: str = field(repr=False)
    """Id of both requests, for vLLM: NixlPushConnector matches the two halves by it."""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the prefill worker's request: the id, and the rank if the engine has
        several."""
        in_turn = self.prefill_kv_transfer_params is not None
        return _headers(self.dp_rank, self.request_id if in_turn else "", {})

    @property
    def prefill_body(self) -> dict[str, Any]:
        """Fields for the JSON body of the prefill worker's request, which replace the caller's
        fields of the same name; None takes a field out, or is sent as null."""
        if self.prefill_kv_transfer_params is None:
            return {**ONE_TOKEN, **self._bootstrap}
        params = dict(self.prefill_kv_transfer_params)
        return {**ONE_TOKEN, "kv_transfer_params": params}

    def decode_body(self, answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Fields to add to the JSON body of the picked worker's request.

        answer: the JSON that this prefill worker answered; not needed for SGLang. The result is
        empty if the answer has no kv_transfer_params: the picked worker then computes the prompt
        itself. Raises UnusableAnswer as hand_over does.
        """
        if self.prefill_kv_transfer_params is None:
            return self._bootstrap
        params = self.decode_kv_transfer_params or hand_over(answer)
        return {"kv_transfer_params": dict(params)} if params else {}

    @property
    def _bootstrap(self) -> dict[str, Any]:
        return {
            "bootstrap_host": self.bootstrap_host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": self.bootstrap_room,
        }


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens, or their estimated number, that the router made of a text or a body."""

    count: int
    """Number of tokens; for the source "estimate", a fourth of the body's bytes at most."""
    source: str
    """Where the tokens are from: "local" (the router's own rendering), "engine" (an engine of the
    model, or its render service), or "estimate" (there are none: the request is routed by load)."""
    verified: bool
    """Whether an engine gave these tokens, or gave the same tokens as the router for all prompts of
    this shape so far."""
    tokenizer_digest: str
    """Digest of the router's own tokenizer and chat template; empty: it has none for the model."""
    shape: str
    """Features of the body that decide how an engine renders it, such as system+tools."""
    estimate_reason: str
    """Why there are no tokens, for the source "estimate": a reason code; else empty."""
    token_bytes: bytes = field(repr=False)
    """The tokens as little-endian u32; empty unless the request had return_tokens."""

    @property
    def token_ids(self) -> "array[int]":
        """The tokens; empty unless the request had return_tokens."""
        return unpack_tokens(self.token_bytes)


class Pick:
    """The worker that serves a request best, reserved until a report or the lease ends it.

    Properties read the answer at each access: most callers need the address only.
    """

    __slots__ = ("fallback", "request_id", "response")

    def __init__(self, request_id: str, response: RouteResponse, *, fallback: bool = False) -> None:
        self.fallback = fallback
        """Whether the client picked by itself, since no router could be reached: nothing is
        reserved, no cache was considered, and reports stay in the client."""
        self.request_id = request_id
        self.response = response
        """The router's answer."""

    @override
    def __repr__(self) -> str:
        shown = (
            "request_id", "reservation_id", "worker_id", "dp_rank", "address", "overlap_tokens",
            "new_tokens", "queue_ms", "queue_ahead", "engine_priority", "lease_s", "fallback",
        )  # fmt: skip
        return f"Pick({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pick):
            return NotImplemented
        return (self.request_id, self.response) == (other.request_id, other.response)

    __hash__ = None  # type: ignore[assignment]  # messages have none

    @property
    def reservation_id(self) -> str:
        return self.response.reservation_id

    @property
    def worker_id(self) -> str:
        return self.response.worker_id

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The picked worker and, of a pair, the prefill worker."""
        response = self.response
        if not response.HasField("prefill_worker"):
            return (response.worker_id,)
        return (response.worker_id, response.prefill_worker.worker_id)

    @property
    def dp_rank(self) -> int | None:
        """Rank of the picked worker, which the request must name (see `headers`); None for an
        engine with a single rank."""
        return _rank(self.response)

    @property
    def address(self) -> str:
        """Address for the request, from the worker's relay or configuration."""
        return self.response.address

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.response.labels)

    @property
    def overlap_tokens(self) -> OverlapTokens:
        overlap = self.response.overlap_tokens
        return OverlapTokens(
            raw=overlap.raw,
            usable=overlap.usable,
            device=overlap.device,
            host=overlap.host,
            disk=overlap.disk,
            predicted=overlap.predicted,
        )

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that the worker has yet to compute."""
        return self.response.new_tokens

    @property
    def queue_ms(self) -> float:
        """Time that the request spent in the router's queue, milliseconds."""
        return self.response.queue_ms

    @property
    def queue_ahead(self) -> int | None:
        """Requests that were ahead of this one when it came to the router's queue; None: it did not
        wait."""
        response = self.response
        return response.queue_ahead if response.HasField("queue_ahead") else None

    @property
    def estimated_ttft_ms(self) -> float | None:
        """Predicted time from the pick to the first token, milliseconds; None: the policy predicts
        none."""
        response = self.response
        return response.estimated_ttft_ms if response.HasField("estimated_ttft_ms") else None

    @property
    def estimated_tpot_ms(self) -> float | None:
        """Predicted time between tokens of the answer, milliseconds; None: not learned yet."""
        response = self.response
        return response.estimated_tpot_ms if response.HasField("estimated_tpot_ms") else None

    @property
    def engine_priority(self) -> int | None:
        """The request's priority in the engine's own direction; None unless it schedules by
        priority."""
        response = self.response
        return response.engine_priority if response.HasField("engine_priority") else None

    @property
    def lease_s(self) -> float:
        """Seconds after the last report at which the reservation ends."""
        return self.response.lease_s

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        return tuple(
            Alternative(other.worker_id, _rank(other), other.address, other.cost)
            for other in self.response.alternatives
        )

    @property
    def prefill_worker(self) -> PrefillWorker | None:
        response = self.response
        if not response.HasField("prefill_worker"):
            return None
        return _prefill_worker(response.prefill_worker, self.request_id)

    @property
    def receipt(self) -> Receipt:
        """The record of the decision, complete enough to recompute it; empty if omitted."""
        return self.response.receipt

    @property
    def prompt(self) -> PromptTokens | None:
        """The tokens that the router made of a text or a body; None: the prompt came as tokens or
        hashes, or the pick is the fallback's."""
        response = self.response
        return prompt_tokens(response.prompt) if response.HasField("prompt") else None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the request: the picked rank if its engine has several, the picked
        instance for Dynamo's frontend, and the id if the request belongs to a pair; see
        PrefillWorker."""
        response = self.response
        in_turn = bool(response.prefill_worker.prefill_kv_transfer_params)
        return _headers(self.dp_rank, self.request_id if in_turn else "", response.labels)


def hand_over(answer: object) -> Mapping[str, Any] | None:
    """The kv_transfer_params in the JSON that a prefill worker answered; None: it has none.

    Raises UnusableAnswer for what is no object, for more than HAND_OVER_DEPTH_MAX objects and lists
    inside one another, and for integers over 64 bits: engines' readers of JSON refuse them, and the
    client would get that refusal.
    """
    if answer is None:
        return None
    if not isinstance(answer, Mapping):
        raise UnusableAnswer(f"the prefill worker answered {_named(answer)}, no JSON object")
    params = answer.get("kv_transfer_params")
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise UnusableAnswer(
            f"the prefill worker's kv_transfer_params are {_named(params)}, no JSON object"
        )
    level: list[object] = [params]
    for _ in range(HAND_OVER_DEPTH_MAX):
        inner: list[object] = []
        for value in level:
            items = value.values() if isinstance(value, Mapping) else value
            for item in items:  # type: ignore[attr-defined]  # level has objects and lists
                if isinstance(item, int):
                    if item not in _INTS:
                        raise UnusableAnswer(
                            "the prefill worker's kv_transfer_params have an integer over 64 bits"
                        )
                elif isinstance(item, (Mapping, list)):
                    inner.append(item)
        if not inner:
            return params
        level = inner
    raise UnusableAnswer(
        f"the prefill worker's kv_transfer_params are nested over {HAND_OVER_DEPTH_MAX} levels deep"
    )


def _named(value: object) -> str:
    return "null" if value is None else type(value).__name__


def prompt_tokens(message: router_pb2.PromptTokens) -> PromptTokens:
    """Reads the PromptTokens message in an answer of Route, Explain or Render."""
    known = message.source in PromptSource.values()
    name = PromptSource.Name(message.source) if known else ""
    return PromptTokens(
        count=message.count,
        source=name.removeprefix("PROMPT_SOURCE_").lower() or "unknown",
        verified=message.verified,
        tokenizer_digest=message.tokenizer_digest,
        shape=message.shape,
        estimate_reason=message.estimate_reason,
        token_bytes=message.token_bytes,
    )


def _headers(rank: int | None, request_id: str, labels: Mapping[str, str]) -> dict[str, str]:
    headers = {"X-Request-Id": request_id} if request_id else {}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    instance = labels.get(INSTANCE_LABEL, "")
    if instance.isascii() and instance.isdigit():
        headers["x-dynamo-worker-instance-id"] = instance
        if rank is not None:
            headers["x-dynamo-dp-rank"] = str(rank)
    return headers


def _prefill_worker(message: router_pb2.PrefillWorker, request_id: str) -> PrefillWorker:
    return PrefillWorker(
        worker_id=message.worker_id,
        dp_rank=_rank(message),
        address=message.address,
        bootstrap_host=message.bootstrap_host,
        bootstrap_port=message.bootstrap_port,
        engine=message.engine,
        bootstrap_room=message.bootstrap_room,
        new_tokens=message.new_tokens,
        prefill_kv_transfer_params=_params(message.prefill_kv_transfer_params),
        decode_kv_transfer_params=_params(message.decode_kv_transfer_params),
        request_id=request_id,
    )


def _params(text: str) -> Mapping[str, Any] | None:
    """Reads JSON from a router; None for an empty text. Raises KvRouteError for text that is no
    JSON object."""
    if not text:
        return None
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreachable(f"the router's kv_transfer_params are no JSON: {error}") from error
    if not isinstance(params, dict):
        raise unreachable("the router's kv_transfer_params are no JSON object")
    return params


def _rank(
    message: RouteResponse | router_pb2.Alternative | router_pb2.PrefillWorker,
) -> int | None:
    return message.dp_rank if message.HasField("dp_rank") else None
