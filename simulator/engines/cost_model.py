"""Durations of an engine's steps and of transfers of its KV cache. Pure.

Two models of a step share an interface:

- `LinearCost`: linear in the work of a step. Attention is priced by pairs of query and key; their
  number is quadratic in a prompt's length, and the same whole or in chunks. Prices: from a roofline
  (simulator/engines/profile.py) or from measurements (simulator/engines/calibration.py).
- `PolynomialCost`: quadratic in a step's prompt tokens, and in the share of the cache that decoding
  requests attend to, like NVIDIA Dynamo's mock engine.

Laws:
- a run of k decode steps takes as long as its k steps one by one;
- more work never takes less time.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil
from types import MappingProxyType

from typing_extensions import override

from indexer.identity import Tier


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of prompt tokens that a step computes."""

    token_count: int
    context_tokens: int
    """Tokens of the same request that are computed already, or were cached."""

    def attention_pairs(self) -> float:
        """Pairs of a query in the chunk and a key at or before it."""
        return self.token_count * (self.context_tokens + (self.token_count + 1) / 2)


Chunks = Sequence[PrefillChunk]


class Distance(IntEnum):
    """Distance of two engines: the smallest unit (host, rack, cluster) that both are in."""

    HOST = 0
    RACK = 1
    CLUSTER = 2


@dataclass(frozen=True, slots=True)
class Link:
    """A connection for KV cache: a transfer of n bytes takes latency_s + n / bytes_per_s."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, byte_count: float) -> float:
        """Duration of a transfer; no bytes take no time."""
        return self.latency_s + byte_count / self.bytes_per_s if byte_count else 0.0


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Size of a token's KV cache, and the links for it."""

    bytes_per_token: int
    """Keys and values of all layers, over all GPUs of the engine."""
    tiers: Mapping[Tier, Link] = field(default_factory=lambda: MappingProxyType({}))
    """Links from a lower tier to the device."""
    distances: Mapping[Distance, Link] = field(default_factory=lambda: MappingProxyType({}))
    """Links from one engine's device to another's."""


class NoLink(LookupError):
    """The cost model has no link for a transfer: a mistake in the profile or in the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel(ABC):
    """Interface: durations of an engine's steps and of transfers of KV cache, in seconds."""

    kv: KvTransfer | None = None
    """Size of a token's KV cache, and links for it; None: this cost model has no transfers."""

    @abstractmethod
    def step_s(self, prefill: Chunks, decodes: int = 0, context_tokens: float = 0) -> float:
        """Duration of one step, in seconds.

        prefill: chunks of prompts. decodes: number of requests that decode. context_tokens: tokens
        that these requests attend to, summed over them.
        """

    @abstractmethod
    def run_s(self, steps: int, decodes: int, context_tokens: float) -> float:
        """Duration of `steps` consecutive decode steps, in seconds; 0 for no step.

        decodes, context_tokens: as for step_s, of the first step; each step makes every sequence a
        token longer. Inverse: simulator/engines/decode_run.py.
        """

    def load_s(self, tokens: int, tier: Tier) -> float:
        """Seconds to load the KV cache of `tokens` from a tier to the device; from the device: 0.

        Raises NoLink.
        """
        if tier is Tier.DEVICE:
            return 0.0
        kv = self._kv()
        link = kv.tiers.get(tier)
        if link is None:
            raise NoLink(f"the cost model has no link from tier {tier.name.lower()} to the device")
        return link.seconds(tokens * kv.bytes_per_token)

    def transfer_s(self, tokens: int, distance: Distance) -> float:
        """Seconds to copy the KV cache of `tokens` from one engine to another. Raises NoLink."""
        kv = self._kv()
        link = kv.distances.get(distance)
        if link is None:
            raise NoLink(
                f"the cost model has no link between engines of the same {distance.name.lower()}"
            )
        return link.seconds(tokens * kv.bytes_per_token)

    def _kv(self) -> KvTransfer:
        if self.kv is None:
            raise NoLink("the cost model has no size of a token's KV cache, and no links")
        return self.kv


@dataclass(frozen=True, slots=True)
class LinearCost(CostModel):
    """Five prices, each of a unit of a step's work:

        step_s = base_s
               + (decodes + prefill chunks) * sequence_s
               + context_tokens * context_token_s
               + prefill_tokens * prefill_token_s
               + attention_pairs * pair_s

    - base_s: reading the weights, and other costs of the smallest step;
    - sequence_s: sampling and bookkeeping;
    - context_token_s: reading one token's keys and values;
    - prefill_token_s: multiplying a prompt token with the weights;
    - pair_s: attention of one query to one key.
    """

    base_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float
    pair_s: float

    @override
    def step_s(self, prefill: Chunks, decodes: int = 0, context_tokens: float = 0) -> float:
        took_s = (
            self.base_s
            + (decodes + len(prefill)) * self.sequence_s
            + context_tokens * self.context_token_s
        )
        for chunk in prefill:
            pairs = chunk.attention_pairs()
            took_s += chunk.token_count * self.prefill_token_s + pairs * self.pair_s
        return took_s

    @override
    def run_s(self, steps: int, decodes: int, context_tokens: float) -> float:
        mean_context = context_tokens + decodes * (steps - 1) / 2
        return steps * (
            self.base_s + decodes * self.sequence_s + mean_context * self.context_token_s
        )


@dataclass(frozen=True, slots=True)
class PolynomialCost(CostModel):
    """A prefill part, if a step has prompt tokens, plus a decode part, if some requests decode:

        prefill_s = p0 + p1 * prefill_tokens + p2 * prefill_tokens ** 2
        decode_s  = d0 + d1 * share + d2 * share ** 2
        share     = min(1, context_tokens / capacity_tokens)

    p0 to p2 and d0 to d2 are coefficients in seconds. Tokens that the request computed before a
    chunk cost nothing, so chunks make a long prompt cheaper.
    """

    prefill_s: tuple[float, float, float]
    """p0 to p2, in seconds."""
    decode_s: tuple[float, float, float]
    """d0 to d2, in seconds. The polynomial must not fall from share 0 to share 1, else a longer
    context takes less time."""
    capacity_tokens: int
    """Tokens that the KV cache holds."""

    @override
    def step_s(self, prefill: Chunks, decodes: int = 0, context_tokens: float = 0) -> float:
        took_s = 0.0
        if prefill:
            tokens = sum(chunk.token_count for chunk in prefill)
            constant, linear, square = self.prefill_s
            took_s = constant + (linear + square * tokens) * tokens
        if decodes:
            constant, linear, square = self.decode_s
            share = min(1.0, context_tokens / self.capacity_tokens)
            took_s += constant + (linear + square * share) * share
        return took_s

    @override
    def run_s(self, steps: int, decodes: int, context_tokens: float) -> float:
        room = self.capacity_tokens - context_tokens
        # Steps below full capacity are summed in closed form; steps at full capacity cost the same.
        n = min(steps, max(0, ceil(room / decodes)))
        first = context_tokens / self.capacity_tokens
        growth = decodes / self.capacity_tokens
        triangle = n * (n - 1) / 2
        pyramid = triangle * (2 * n - 1) / 3
        shares = n * first + growth * triangle
        squares = n * first**2 + 2 * first * growth * triangle + growth**2 * pyramid
        constant, linear, square = self.decode_s
        full = steps - n
        return steps * constant + linear * (shares + full) + square * (squares + full)


@dataclass(frozen=True, slots=True)
class SlowedCost(CostModel):
    """Another cost model's steps, each `factor` times as long; its transfers take as long as
    there."""

    cost: CostModel
    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv", self.cost.kv)

    @override
    def step_s(self, prefill: Chunks, decodes: int = 0, context_tokens: float = 0) -> float:
        return self.factor * self.cost.step_s(prefill, decodes, context_tokens)

    @override
    def run_s(self, steps: int, decodes: int, context_tokens: float) -> float:
        return self.factor * self.cost.run_s(steps, decodes, context_tokens)
