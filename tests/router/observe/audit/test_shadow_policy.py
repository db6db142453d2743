"""A policy that watches: numbers worked out by hand."""

from typing import Any

import msgspec
import numpy as np
import pytest

from events.plane.settings import NatsSettings
from router.app.processes.router_process import RouterApp
from router.config.keys import ConfigError
from router.config.settings.configurations import ServeConfig
from router.config.settings.routing_settings import AffinitySettings, GuardSettings, RoutingSettings
from router.decide.policies import POLICIES
from router.decide.policies.configured import configured, shadow_policy
from router.decide.policies.policy import Scores
from router.observe.audit.shadow_policy import Agreement, Shadow, difference, would_pick
from tests.stage.fleet import Fleet, prompt
from tests.stage.guards import TunedGuard
from tests.stage.rows import RATE, rows

OWN = "tests.router.decide.policies.own_policies"
FREE = ("", "", "")
NEAR = {"overlap_tokens": 960, "running": 8}
FAR = {"running": 2}
FULL = {"overlap_tokens": 960, "excluded": "full"}
"""A prompt of 1000 tokens: the first token takes (500 + 40 + its attention) / RATE seconds on NEAR,
(500 + 1000 * 1.01) / RATE = 1.51 s on FAR."""


def scores(*costs: float, chances: tuple[float, ...] | None = None) -> Scores:
    return Scores(np.array(costs), chances=None if chances is None else np.array(chances))


def test_the_same_choice_gains_nothing() -> None:
    told = difference(rows(1000, NEAR, FAR), FREE[:2], 0, scores(1, 2))
    assert told == (Agreement.SAME, 0.0, 0.0, 0.0)


def test_another_choice_gains_and_loses_what_is_predicted() -> None:
    near_s = (500 + 40 * (1 + 980 / 50_000)) / RATE
    told = difference(rows(1000, NEAR, FAR), FREE[:2], 0, scores(2, 1))
    assert told.agreement is Agreement.OTHER
    assert told.overlap_tokens == -960
    assert told.ttft_s == pytest.approx(near_s - 1.51)
    assert told.active_slots == -6


def test_a_tie_is_held_against_its_mean() -> None:
    told = difference(rows(1000, NEAR, FAR, FAR), FREE, 1, scores(1, 1, 2))
    assert told.agreement is Agreement.TIED
    assert told.overlap_tokens == 480


def test_a_draw_is_held_against_its_mean() -> None:
    drawn = scores(9, 0, 0, chances=(0.75, 0.25, 0.0))
    assert difference(rows(1000, NEAR, FAR, FAR), FREE, 1, drawn).overlap_tokens == 720
    told = difference(rows(1000, NEAR, FAR, FAR), FREE, 2, drawn)
    assert told.agreement is Agreement.OTHER


def test_it_picks_no_excluded_row_and_none_without_a_number() -> None:
    second, nobody_can = np.array([False, True]), np.array([False, False])
    assert would_pick(scores(0, 1), second) == pytest.approx([0, 1])
    assert would_pick(scores(0, 1), nobody_can) is None
    assert would_pick(scores(0, 1, chances=(1.0, 0.0)), second) is None
    picked = difference(rows(1000, NEAR, FAR, FAR), ("full", "", ""), 1, scores(0, 1, np.nan))
    assert picked.agreement is Agreement.SAME
    nobody = difference(rows(1000, NEAR, FAR), FREE[:2], 0, scores(np.nan, np.nan))
    assert nobody.agreement is Agreement.FAILED


def test_a_draw_that_the_guard_moves_goes_to_the_cheapest_of_the_others() -> None:
    busy, idle = {"overlap_tokens": 64, "running": 8}, {"running": 0}
    drawn = scores(1, 2, 3, chances=(1.0, 0.0, 0.0))
    told = difference(rows(1000, busy, idle, FAR), FREE, 1, drawn, GuardSettings())
    assert (told.agreement, told.overlap_tokens) == (Agreement.SAME, 0.0)
    drawn = scores(3, 2, 2, chances=(0.5, 0.5, 0.0))
    told = difference(rows(1000, busy, idle, idle), FREE, 2, drawn, GuardSettings())
    assert told.agreement is Agreement.TIED  # drawn: the second; moved: the second or the third
    assert told.active_slots == 0.0
    nobody = difference(rows(1000, busy, idle), FREE[:2], 1, scores(1, 2), GuardSettings())
    assert nobody.agreement is Agreement.SAME


def test_a_policy_that_draws_under_the_guard_agrees_with_itself() -> None:
    parameters = {"dynamo-blocks": {"temperature": 1.0}}
    guard = GuardSettings(policies=("dynamo-blocks",))
    fleet = Fleet(policy="dynamo-blocks", parameters=parameters, guard=guard)
    for number in range(3):
        fleet.cache(fleet.add(f"w{number}", running=6 * number), prompt(1600), 640 * number)
    shadow = Shadow(configured(fleet.core.routing)["dynamo-blocks"], guard)
    for _ in range(60):
        fleet.core.route(fleet.request(prompt(1600)), fleet.now_s, watch=shadow.watch)
    assert 0 < fleet.core.guarded < 60
    assert set(shadow.decisions) <= {Agreement.SAME, Agreement.TIED}


def test_a_shadow_has_its_bonus_for_the_sessions_worker() -> None:
    affinity = AffinitySettings(bonus={"least-loaded": 3.0})
    for about, agreement in (({}, Agreement.SAME), ({"affinity": affinity}, Agreement.OTHER)):
        routing = RoutingSettings(shadow_policy="least-loaded", **about)
        policy = shadow_policy(routing, configured(routing))
        assert policy is not None
        fleet, shadow = Fleet(policy="round-robin"), Shadow(policy, GuardSettings())
        for name in "ab":
            fleet.add(name)
        fleet.picked(prompt(640), session_id="s")
        request = fleet.request(prompt(640), session_id="s")
        fleet.core.route(request, fleet.now_s, watch=shadow.watch)  # to the idle worker
        assert shadow.decisions == {agreement: 1}


def watched(policy: str, shadow: Shadow) -> None:
    """One decision of a policy, between a busy holder and an idle worker."""
    fleet = Fleet(policy=policy, prefill_rate=1000.0)
    asked = prompt(1600)
    fleet.cache(fleet.add("holder"), asked, 1584)
    fleet.say(next(iter(fleet.relays)), running=9)
    fleet.add("idle")
    fleet.core.route(fleet.request(asked), fleet.now_s, watch=shadow.watch)


def test_gains_and_losses_are_summed_apart() -> None:
    shadow = Shadow(POLICIES["least-loaded"], GuardSettings())
    watched("dynamo-logit", shadow)  # goes to the holder
    watched("least-loaded", shadow)
    assert shadow.decisions == {Agreement.OTHER: 1, Agreement.SAME: 1}
    assert (shadow.overlap_tokens.gain, shadow.overlap_tokens.loss) == (0.0, 1584.0)
    assert shadow.ttft_s.gain == 0
    assert shadow.ttft_s.loss == pytest.approx(1.6, abs=0.1)
    shadow = Shadow(POLICIES["dynamo-logit"], GuardSettings())
    watched("least-loaded", shadow)
    assert shadow.overlap_tokens.gain == 1584
    assert shadow.ttft_s.gain == pytest.approx(1.6, abs=0.1)


def test_an_own_policy_that_fails_is_counted() -> None:
    routing = RoutingSettings(shadow_policy=f"{OWN}:raises")
    policy = shadow_policy(routing, configured(routing))
    assert policy is not None
    shadow = Shadow(policy, GuardSettings())
    watched("least-loaded", shadow)
    assert shadow.decisions == {Agreement.FAILED: 1}


def test_the_shadow_has_the_configured_numbers_and_is_no_choice_of_requests() -> None:
    numbers = {"ttft": {"keep": 3.0}}
    routing = RoutingSettings(shadow_policy="ttft", parameters=numbers)
    policy = shadow_policy(routing, configured(routing))
    assert policy is not None
    assert policy.parameters["keep"] == 3.0
    assert shadow_policy(RoutingSettings(), POLICIES) is None
    own = RoutingSettings(shadow_policy=f"{OWN}:raises")
    assert own.shadow_policy not in configured(own)


@pytest.mark.parametrize("name", ["nonsense", f"{OWN}:no_such"])
def test_a_shadow_that_there_is_not_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"shadow_policy"):
        shadow_policy(RoutingSettings(shadow_policy=name), POLICIES)


def test_who_decodes_is_none_of_its_business() -> None:
    shadow = Shadow(POLICIES["dynamo-adaptive"], GuardSettings())
    watched("decode-room", shadow)
    assert shadow.decisions == {}


@pytest.mark.parametrize(
    ("about", "timed"),
    [
        ({"shadow_policy": "ttft"}, True),
        ({"shadow_policy": f"{OWN}:longest_overlap"}, True),
        ({"shadow_policy": "least-loaded"}, False),
        ({}, False),
    ],
)
async def test_all_picks_are_timed_while_a_policy_watches_that_goes_by_time(
    about: dict[str, Any], timed: bool
) -> None:
    config = ServeConfig(nats=NatsSettings(url="nats://127.0.0.1:1"))
    changed = msgspec.structs.replace(config, routing=RoutingSettings(**about))
    app = RouterApp(config, read_again=lambda: changed)
    await app.reload()
    assert app.core.watched.timed is timed


def test_counts_depend_on_a_guard_only_where_it_looks_at_the_policy() -> None:
    policies = configured(RoutingSettings())
    other = TunedGuard(request_tokens=7.0)
    shadows = {
        name: [Shadow(policies[name], guard).settings for guard in (GuardSettings(), other)]
        for name in ("ttft", "least-loaded")
    }
    assert shadows["ttft"][0] != shadows["ttft"][1]
    assert shadows["least-loaded"][0] == shadows["least-loaded"][1]
