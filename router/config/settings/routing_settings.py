"""Settings of picks: the fleet's, and those of one model."""

from typing import Annotated

import msgspec
from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings
from router.config.settings.health_settings import CapacitySettings, OutlierSettings
from router.config.settings.presets import PresetName


class HotPrefixSettings(Settings, frozen=True):
    """Copies of prefixes that many ask for, to workers that have time."""

    enabled: Annotated[bool, Meta(description="copy hot prefixes to more workers")] = False
    score: Annotated[
        float, Meta(gt=0, description="hits / sqrt(age in seconds) from which on a prefix is hot")
    ] = 4.0
    queue: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker with more requests than this, and more than the mean, is busy",
        ),
    ] = 10


class GuardSettings(Settings, frozen=True):
    """A pick moves on while its worker's queue costs more than its cache saves."""

    enabled: Annotated[
        bool, Meta(description="guard the picks of the policies in routing.guard.policies")
    ] = True
    policies: Annotated[
        tuple[str, ...],
        Meta(description="policies whose picks the guard may move; picks of others stay"),
    ] = ("dynamo-adaptive", "ttft")
    request_tokens: Annotated[
        float,
        Meta(
            ge=0,
            description="prompt tokens that each active request of a worker adds to the wait that"
            " the guard expects there",
        ),
    ] = 300.0
    margin: Annotated[
        float,
        Meta(
            ge=0,
            description="share of the prompt's tokens by which a worker's wait may exceed the"
            " shortest one before the guard moves the pick",
        ),
    ] = 0.05

    def looks_at(self, policy: str) -> bool:
        """Whether a policy's picks may be moved."""
        return self.enabled and policy in self.policies


class AffinitySettings(Settings, frozen=True):
    """Sessions go on where their last requests went: as a term of the cost, or before it."""

    bonus: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description="by policy: taken off the cost of the worker that the session's last"
            " request went to, in the unit of the policy's cost"
        ),
    ] = msgspec.field(default_factory=dict)
    hard: Annotated[
        bool,
        Meta(
            description="no other worker gets a session's request while that one may take it and"
            " has room; then the next by cost does, and the session goes on there"
        ),
    ] = False

    def looks_at(self, policy: str) -> bool:
        """Whether picks of a policy go by sessions, beyond what the policy does itself."""
        return self.hard or policy in self.bonus


class RoutingSettings(Settings, frozen=True):
    """How picks are made and kept."""

    preset: Annotated[
        PresetName,
        Meta(
            description="set of routing settings with a name: see `kvroute policies --presets`; a"
            " key that the file, the environment or a flag sets wins over the preset's",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "balanced"
    policy: Annotated[
        str,
        Meta(
            description="policy of requests that name none: see `kvroute policies`; or"
            " module:function, a policy of your own",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "dynamo-adaptive"
    own_policies: Annotated[
        tuple[str, ...],
        Meta(description="policies of your own that requests may name, each module:function"),
    ] = ()
    prefill_policy: Annotated[
        str,
        Meta(
            description="policy that picks the prefill worker of a pair, if the request names none"
        ),
    ] = "prefill-queue"
    decode_policy: Annotated[
        str, Meta(description="policy that picks the decode worker of a pair")
    ] = "decode-room"
    local_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a prompt with at most so many uncached tokens on its decode worker is"
            " computed there, without a prefill worker",
        ),
    ] = 256
    local_prefill_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="a prompt of which at most this percentage is uncached on its decode"
            " worker is computed there, without a prefill worker",
        ),
    ] = 5
    policy_per_request: Annotated[bool, Meta(description="let requests name a policy")] = True
    expected_output_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="output tokens that a request is expected to need, if it names none",
        ),
    ] = 1
    prompt_tokens_max: Annotated[
        int, Meta(ge=1, description="tokens of the longest prompt; longer ones are refused")
    ] = 1 << 20
    alternatives: Annotated[
        int, Meta(ge=0, le=16, description="next best workers in each answer, at most")
    ] = 2
    lease_s: Annotated[
        Seconds,
        Meta(description="seconds after its last Report at which a reservation ends by itself"),
    ] = 120.0
    memory_window_s: Annotated[
        Seconds,
        Meta(
            description="seconds after its end for which a request is remembered: its id gets the"
            " same answer, and `kvroute explain --request` shows its receipt"
        ),
    ] = 180.0
    session_ttl_s: Annotated[
        Seconds, Meta(description="seconds for which a session's last worker is remembered")
    ] = 900.0
    sessions_max: Annotated[int, Meta(ge=0, description="sessions remembered at once; 0: none")] = (
        65_536
    )
    reservations_max: Annotated[
        int,
        Meta(
            ge=1, description="open and remembered reservations; requests beyond them are refused"
        ),
    ] = 200_000
    seed: Annotated[
        int | None,
        Meta(description="seed of the draws between workers of equal cost; none: a random one"),
    ] = None
    predicted_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds for which a pick's blocks count as held before its worker's"
            " events confirm them; 0: not at all",
        ),
    ] = 5.0
    approximate_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds for which a pick's blocks count as held where events are missing"
            " or leave blocks out; 0: not at all",
        ),
    ] = 120.0
    parameters: Annotated[
        dict[str, dict[str, float]],
        Meta(description="parameters of policies, by policy and name: see `kvroute policies`"),
    ] = msgspec.field(default_factory=dict)
    prefill_rate: Annotated[
        Seconds,
        Meta(
            description="prompt tokens a second that a worker computes, until its own rate is"
            " measured"
        ),
    ] = 20_000.0
    shadow_policy: Annotated[
        str | None,
        Meta(
            description="policy that scores the same requests without any effect on picks; none:"
            " no such scores"
        ),
    ] = None
    shadow_share: Annotated[
        float, Meta(gt=0, le=1, description="share of the requests that the shadow policy scores")
    ] = 0.01
    hot_prefixes: HotPrefixSettings = HotPrefixSettings()
    outliers: OutlierSettings = OutlierSettings()
    capacity: CapacitySettings = CapacitySettings()
    guard: GuardSettings = GuardSettings()
    affinity: AffinitySettings = AffinitySettings()
    host_label: Annotated[str, Meta(description="label that names a worker's host")] = "host"
    rack_label: Annotated[str, Meta(description="label that names a worker's rack")] = "rack"
    cluster_label: Annotated[str, Meta(description="label that names a worker's cluster")] = (
        "cluster"
    )


class ModelRoutingSettings(Settings, frozen=True):
    """How requests for one model are decided, where that differs from `routing`."""

    policy: Annotated[
        str | None,
        Meta(description="policy of requests for this model that name none; none: routing.policy"),
    ] = None
    parameters: Annotated[
        dict[str, dict[str, float]],
        Meta(
            description="numbers of policies for this model's requests, by policy and name, over"
            " those of routing.parameters"
        ),
    ] = msgspec.field(default_factory=dict)
    guard: Annotated[
        GuardSettings | None,
        Meta(
            description="guard of this model's picks; a key that is left out is as in routing.guard"
        ),
    ] = None
