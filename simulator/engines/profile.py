"""Hardware and model of an engine: YAML files that become a cost model and defaults.

    profile = load_profile("llama-8b-h100")      # a name in simulator/engines/profiles, or a path
    cost = profile.cost_model()

Every section names the source of its numbers; a section without a source is refused. An unknown
key is refused as well, since a misspelt price would be 0.
"""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from indexer.identity import Tier
from simulator.engines.cost_model import (
    CostModel,
    Distance,
    KvTransfer,
    LinearCost,
    Link,
    PolynomialCost,
)

PROFILES = Path(__file__).with_name("profiles")

# Bounds that no sensible number reaches also keep infinity out.
Amount = Annotated[float, Meta(ge=0, le=1e12)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Coefficient = Annotated[float, Meta(ge=-1e12, le=1e12)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]


class ProfileError(ValueError):
    """A mistake in a profile, with its key, or an unknown name of a profile."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Model(_Section, frozen=True):
    """A dense transformer: the sizes from which its arithmetic is computed."""

    source: Text
    parameters_billions: Positive
    layers: Count
    attention_width: Count
    """Query heads * head size."""
    bytes_per_parameter: Positive


class Hardware(_Section, frozen=True):
    """The GPUs of an engine; the numbers are per GPU."""

    source: Text
    gpus: Count
    tflops: Positive
    """Dense arithmetic in the model's precision, in 1e12 operations a second."""
    memory_gb_per_s: Positive


class Efficiency(_Section, frozen=True):
    """Shares of the data sheet's speeds that an engine reaches, and what a step costs beside
    arithmetic and memory traffic."""

    source: Text
    flops: Share
    memory: Share
    parallel: Share
    """Share of `flops` and of `memory` that is left when several GPUs work together."""
    step_ms: Amount
    sequence_us: Amount


class Roofline(_Section, frozen=True, tag="roofline", tag_field="kind"):
    """Prices from arithmetic and memory traffic:

    - a step reads all weights once, and the keys and values of every decoding request's context;
    - a prompt token takes 2 operations a parameter, spread over all GPUs;
    - a pair of a query and a key takes 4 * layers * attention_width operations.
    """

    model: Model
    hardware: Hardware
    efficiency: Efficiency

    def cost_model(self, kv: KvTransfer) -> LinearCost:
        model, hardware, reached = self.model, self.hardware, self.efficiency
        bytes_per_s = hardware.gpus * hardware.memory_gb_per_s * 1e9
        bytes_per_s *= reached.memory * reached.parallel
        flops = hardware.gpus * hardware.tflops * 1e12 * reached.flops * reached.parallel
        parameters = model.parameters_billions * 1e9
        return LinearCost(
            base_s=reached.step_ms / 1e3 + parameters * model.bytes_per_parameter / bytes_per_s,
            sequence_s=reached.sequence_us / 1e6,
            context_token_s=kv.bytes_per_token / bytes_per_s,
            prefill_token_s=2 * parameters / flops,
            pair_s=4 * model.layers * model.attention_width / flops,
            kv=kv,
        )


class Linear(_Section, frozen=True, tag="linear", tag_field="kind"):
    """Measured prices of a step's work; simulator/engines/calibration.py writes such a section."""

    source: Text
    base_ms: Amount
    sequence_us: Amount
    context_token_ns: Amount
    prefill_token_us: Amount
    pair_ns: Amount

    def cost_model(self, kv: KvTransfer) -> LinearCost:
        return LinearCost(
            base_s=self.base_ms / 1e3,
            sequence_s=self.sequence_us / 1e6,
            context_token_s=self.context_token_ns / 1e9,
            prefill_token_s=self.prefill_token_us / 1e6,
            pair_s=self.pair_ns / 1e9,
            kv=kv,
        )


class Polynomial(_Section, frozen=True, tag="polynomial", tag_field="kind"):
    """Duration of a step as polynomials: coefficients of 1, x and x ** 2, in milliseconds."""

    source: Text
    prefill_ms: tuple[Amount, Amount, Amount]
    """x: a step's prompt tokens."""
    decode_ms: tuple[Amount, Amount, Coefficient]
    """x: the share of the KV cache that the decoding requests attend to, 0 to 1."""

    def __post_init__(self) -> None:
        _, linear, square = self.decode_ms
        if linear + 2 * square < 0:
            raise ValueError(
                "decode_ms falls before x = 1 (linear + 2 * square < 0): a longer context would"
                " take less time"
            )

    def cost_model(self, kv: KvTransfer, capacity_tokens: int) -> PolynomialCost:
        p0, p1, p2 = self.prefill_ms
        d0, d1, d2 = self.decode_ms
        return PolynomialCost(
            prefill_s=(p0 / 1e3, p1 / 1e3, p2 / 1e3),
            decode_s=(d0 / 1e3, d1 / 1e3, d2 / 1e3),
            capacity_tokens=capacity_tokens,
            kv=kv,
        )


class LinkSection(_Section, frozen=True):
    """A connection for KV cache, all GPUs of the engine together."""

    gb_per_s: Positive
    latency_us: Amount = 0.0

    def link(self) -> Link:
        return Link(self.gb_per_s * 1e9, self.latency_us / 1e6)


class Tiers(_Section, frozen=True):
    """Links from each tier to the device."""

    host: LinkSection
    disk: LinkSection


class Distances(_Section, frozen=True):
    """Links to another engine's device on the same host, in the same rack, and in the cluster."""

    host: LinkSection
    rack: LinkSection
    cluster: LinkSection


class Kv(_Section, frozen=True):
    """Size of a token's keys and values, and the links for them."""

    source: Text
    bytes_per_token: Count
    tiers: Tiers
    distances: Distances

    def transfer(self) -> KvTransfer:
        tiers, distances = self.tiers, self.distances
        return KvTransfer(
            bytes_per_token=self.bytes_per_token,
            tiers={Tier.HOST: tiers.host.link(), Tier.DISK: tiers.disk.link()},
            distances={
                Distance.HOST: distances.host.link(),
                Distance.RACK: distances.rack.link(),
                Distance.CLUSTER: distances.cluster.link(),
            },
        )


class EngineDefaults(_Section, frozen=True):
    """An engine's default limits."""

    source: Text
    block_size: Count
    block_count: Count
    max_num_batched_tokens: Count
    max_num_seqs: Count

    @property
    def capacity_tokens(self) -> int:
        return self.block_count * self.block_size

    def blocks_of(self, block_size: int) -> int:
        """How many blocks of another size the same memory holds."""
        return self.capacity_tokens // block_size


class Profile(_Section, frozen=True):
    """An engine: its costs, and its limits."""

    summary: Text
    step: Roofline | Linear | Polynomial
    kv: Kv
    engine: EngineDefaults

    def cost_model(self, capacity_tokens: int | None = None) -> CostModel:
        """The cost model of the engine. capacity_tokens: tokens that the KV cache holds, which only
        a polynomial step needs; None: the profile's own number."""
        kv = self.kv.transfer()
        if isinstance(self.step, Polynomial):
            return self.step.cost_model(kv, capacity_tokens or self.engine.capacity_tokens)
        return self.step.cost_model(kv)


def profile_names() -> list[str]:
    """Names of the profiles that ship with the project."""
    return sorted(file.stem for file in PROFILES.glob("*.yaml"))


@cache
def load_profile(name_or_path: str) -> Profile:
    """Reads a profile: a name from `profile_names`, or the path of a YAML file.

    Anything with a slash or a suffix is a path. Read once, then remembered. Raises ProfileError.
    """
    path = Path(name_or_path)
    if path.name == name_or_path and not path.suffix:
        path = PROFILES / f"{name_or_path}.yaml"
        if not path.is_file():
            names = ", ".join(profile_names())
            raise ProfileError(f"no such profile: {name_or_path}; there are {names}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error
    return parse_profile(text, str(path))


def parse_profile(text: str, where: str) -> Profile:
    """A profile from its YAML. where: name of the text in errors. Raises ProfileError."""
    try:
        return msgspec.convert(yaml.safe_load(text), Profile)
    except yaml.YAMLError as error:
        raise ProfileError(f"{where}: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise ProfileError(f"{where}: {error}") from error
