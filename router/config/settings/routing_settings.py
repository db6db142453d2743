"""Settings of picks: for all models, and for one model."""

from typing import Annotated

import msgspec
from msgspec import Meta

from events.plane.settings import FIRST_WEEK, Seconds, Settings
from router.config.settings.health_settings import CapacitySettings, OutlierSettings
from router.config.settings.presets import PresetName


class HotPrefixSettings(Settings, frozen=True):
    """Copies of prefixes that many requests share, to workers that are not busy."""

    enabled: Annotated[
        bool,
        Meta(
            description="have further workers compute the prefixes that many requests share, so"
            " that these workers hold the prefixes, too"
        ),
    ] = False


REQUEST_TOKENS = 300.0
MARGIN = 0.05
"""Prompt tokens that the guard adds to a worker's expected wait for each active request, and share
of the prompt's tokens by which a wait may exceed the shortest one; chosen by tests/bar."""


class GuardSettings(Settings, frozen=True):
    """The guard, which moves a pick away from a worker whose queue costs more than its
    cache saves.
    """

    policies: Annotated[
        tuple[str, ...],
        Meta(
            description="policies whose picks the guard moves away from workers with a long wait;"
            " empty: the guard is off"
        ),
    ] = ("dynamo-adaptive", "ttft")

    @property
    def request_tokens(self) -> float:
        """Prompt tokens that each active request adds to the wait expected at its worker."""
        return REQUEST_TOKENS

    @property
    def margin(self) -> float:
        """Share of the prompt's tokens by which a worker's wait may exceed the shortest one."""
        return MARGIN

    def looks_at(self, policy: str) -> bool:
        """Whether the guard may move picks of a policy."""
        return policy in self.policies


class AffinitySettings(Settings, frozen=True):
    """Session affinity: a session's requests go to the worker of its last request, by a bonus on
    its cost or strictly.
    """

    bonus: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description="by policy, the number that is subtracted from the cost of the worker"
            " of the session's last request, in the unit of the policy's cost"
        ),
    ] = msgspec.field(default_factory=dict)
    hard: Annotated[
        bool,
        Meta(
            description="send all requests of a session to the worker of its last request, as"
            " long as that worker may take them and has room"
        ),
    ] = False

    def looks_at(self, policy: str) -> bool:
        """Whether sessions change picks of a policy, beyond what the policy does itself."""
        return self.hard or policy in self.bonus


class RoutingSettings(Settings, frozen=True):
    """How workers are picked, and how long picks are remembered."""

    preset: Annotated[
        PresetName,
        Meta(
            description="name of a set of routing settings: see `kvroute policies --presets`;"
            " keys that are set win over the preset's",
            extra_json_schema=FIRST_WEEK,
        ),
    ] = "balanced"
    policy: Annotated[
        str,
        Meta(
            description="policy of requests that name no policy: see `kvroute policies`; or"
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
            description="policy that picks the prefill worker of a pair, if the request names no"
            " policy"
        ),
    ] = "prefill-queue"
    decode_policy: Annotated[
        str, Meta(description="policy that picks the decode worker of a pair")
    ] = "decode-room"
    local_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="uncached prompt tokens on the decode worker up to which, or up to 5 % of"
            " the prompt, it computes the prompt without a prefill worker; 0: only if all are"
            " cached",
        ),
    ] = 256
    pair_labels: Annotated[
        tuple[str, ...],
        Meta(
            max_length=8,
            description="labels of workers whose values must be equal in both workers of a pair,"
            " such as the revision of a rollout",
        ),
    ] = ("revision",)
    label_shares: Annotated[
        dict[Annotated[str, Meta(pattern="^[^=]+=")], Annotated[float, Meta(ge=0, le=1)]],
        Meta(
            max_length=8,
            description="share (0 to 1) of the requests that goes to workers with a label:"
            " {revision=v2: 0.05} sends 5 % there; other workers get the rest",
        ),
    ] = msgspec.field(default_factory=dict)
    policy_per_request: Annotated[
        bool, Meta(description="let requests name the policy that decides them")
    ] = True
    expected_output_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="output tokens that a request is expected to need, if it names no number",
        ),
    ] = 1
    prompt_tokens_max: Annotated[
        int, Meta(ge=1, description="tokens of the longest prompt; longer prompts are refused")
    ] = 1 << 20
    alternatives: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="most next best workers that an answer lists beside the picked one",
        ),
    ] = 2
    lease_s: Annotated[
        Seconds,
        Meta(
            description="seconds without a Report call for a request after which its reservation"
            " ends, so that it no longer counts as load of its worker; a request that ended is"
            " remembered for half as long again, for repeated ids and `kvroute explain --request`"
        ),
    ] = 120.0
    session_ttl_s: Annotated[
        Seconds,
        Meta(
            description="seconds after a session's last request for which its worker is remembered"
        ),
    ] = 900.0
    reservations_max: Annotated[
        int,
        Meta(
            ge=1,
            description="most reservations, open ones and those that have ended but are kept for"
            " late reports; further requests are refused",
        ),
    ] = 200_000
    approximate_ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds for which the blocks of a picked prompt count as cached on a"
            " worker that publishes no events, or events that leave blocks out; 0: not at all",
        ),
    ] = 120.0
    parameters: Annotated[
        dict[str, dict[str, float]],
        Meta(
            description="parameters of policies, by policy and parameter name: see `kvroute"
            " policies`"
        ),
    ] = msgspec.field(default_factory=dict)
    shadow_policy: Annotated[
        str | None,
        Meta(
            description="second policy that scores the same requests for comparison, without any"
            " effect on picks; none: no comparison"
        ),
    ] = None
    shadow_share: Annotated[
        float,
        Meta(
            gt=0, le=1, description="share (0 to 1) of the requests that the shadow policy scores"
        ),
    ] = 0.01
    hot_prefixes: HotPrefixSettings = HotPrefixSettings()
    outliers: OutlierSettings = OutlierSettings()
    capacity: CapacitySettings = CapacitySettings()
    guard: GuardSettings = GuardSettings()
    affinity: AffinitySettings = AffinitySettings()

    @property
    def compared_labels(self) -> tuple[str, ...]:
        """Names of the labels that pair_labels and label_shares read."""
        shared = (label.partition("=")[0] for label in self.label_shares)
        return tuple(dict.fromkeys((*self.pair_labels, *shared)))


class ModelRoutingSettings(Settings, frozen=True):
    """Settings of picks for one model, where they differ from `routing`."""

    policy: Annotated[
        str | None,
        Meta(
            description="policy of requests for this model that name no policy; none: that of"
            " routing.policy"
        ),
    ] = None
    parameters: Annotated[
        dict[str, dict[str, float]],
        Meta(
            description="parameters of policies for this model's requests, by policy and"
            " parameter name; they win over routing.parameters"
        ),
    ] = msgspec.field(default_factory=dict)
    guard: Annotated[
        GuardSettings | None,
        Meta(description="settings of the guard for this model's picks; none: routing.guard's"),
    ] = None
