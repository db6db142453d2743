"""How long one engine step takes: a roofline of a transformer on a GPU. Pure.

    step_s = base_s
           + decode_sequences * sequence_s + decode_context_tokens * context_token_s
           + prefill_tokens * prefill_token_s + attention_pairs * pair_s

- base_s: reading the weights once, at the memory bandwidth, plus the step's fixed overhead;
- context_token_s: reading one token's keys and values, at the memory bandwidth;
- prefill_token_s: 2 floating point operations a parameter, at the arithmetic rate;
- pair_s: 4 * layers * hidden operations for each pair of a query and an earlier key, so that a
  prompt costs linear plus quadratic time, chunked or not.

Sources. Models: the published configurations of Llama 3.1 8B and 70B (32 or 80 layers, hidden size
4096 or 8192, 8 KV heads of 128, bf16). GPU: NVIDIA's H100 SXM datasheet (989 Tflop/s dense bf16,
3.35 TB/s). Assumptions, of ours: half of the arithmetic and three quarters of the bandwidth are
reached, tensor parallelism keeps nine tenths of that, 2 ms fixed overhead a step (4 ms with
tensor parallelism), 20 us a sequence for sampling and bookkeeping. These are typical, not measured.
"""

from dataclasses import dataclass

_H100_FLOPS = 989e12
_H100_BYTES_PER_S = 3.35e12
_FLOPS_REACHED = 0.5
_BANDWIDTH_REACHED = 0.75
_TENSOR_PARALLEL_KEPT = 0.9
_BYTES_PER_VALUE = 2
_SEQUENCE_S = 20e-6


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of prompt tokens that one step computes."""

    token_count: int
    context_tokens: int
    """Tokens of the same request that are computed already, or were found in the cache."""

    def attention_pairs(self) -> float:
        """Pairs of a query in the chunk and a key at or before it."""
        return self.token_count * (self.context_tokens + (self.token_count + 1) / 2)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The five prices of a step, all in seconds."""

    base_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float
    pair_s: float

    def step_s(
        self,
        prefill: list[PrefillChunk],
        decode_sequences: int = 0,
        decode_context_tokens: float = 0,
    ) -> float:
        """Duration of one step, in seconds."""
        prefill_tokens = sum(chunk.token_count for chunk in prefill)
        pairs = sum(chunk.attention_pairs() for chunk in prefill)
        return (
            self.base_s
            + (decode_sequences + len(prefill)) * self.sequence_s
            + decode_context_tokens * self.context_token_s
            + prefill_tokens * self.prefill_token_s
            + pairs * self.pair_s
        )


def h100_cost(
    parameters: float,
    layers: int,
    hidden: int,
    kv_values_per_layer: int,
    gpus: int,
    overhead_s: float,
) -> CostModel:
    """The roofline of a dense bf16 transformer on `gpus` H100s in tensor parallelism.

    kv_values_per_layer: 2 (key and value) * KV heads * head size.
    """
    kept = 1.0 if gpus == 1 else _TENSOR_PARALLEL_KEPT
    flops = gpus * _H100_FLOPS * _FLOPS_REACHED * kept
    bytes_per_s = gpus * _H100_BYTES_PER_S * _BANDWIDTH_REACHED * kept
    return CostModel(
        base_s=overhead_s + parameters * _BYTES_PER_VALUE / bytes_per_s,
        sequence_s=_SEQUENCE_S,
        context_token_s=layers * kv_values_per_layer * _BYTES_PER_VALUE / bytes_per_s,
        prefill_token_s=2 * parameters / flops,
        pair_s=4 * layers * hidden / flops,
    )


LLAMA_8B_H100 = h100_cost(8.03e9, 32, 4096, 2 * 8 * 128, gpus=1, overhead_s=0.002)
"""8.4 ms a step, 32 us a prompt token (31 thousand a second)."""

LLAMA_70B_4XH100 = h100_cost(70.6e9, 80, 8192, 2 * 8 * 128, gpus=4, overhead_s=0.004)
"""19.6 ms a step, 79 us a prompt token (12.6 thousand a second)."""
