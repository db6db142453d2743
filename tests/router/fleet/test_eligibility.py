"""Exclusions that are kept are those that each request would have by itself."""

import random

from router.config.settings.configurations import ModelSettings
from router.fleet.eligibility import KEPT_MAX, LORA_ELSEWHERE, NARROWING_MAX, Exclusions, exclusion
from router.request.narrowing import Narrowing
from router.request.refusal import Refusal
from router.request.request import Request, Role
from tests.stage.fleet import Fleet, prompt

ROLES = ("both", "prefill", "decode")
NAMES = [f"w{i}" for i in range(6)]


def some(rng: random.Random) -> frozenset[str]:
    return frozenset(rng.sample(NAMES, rng.choice((0, 0, 0, 1, 3))))


def any_request(rng: random.Random, fleet: Fleet) -> Request:
    return fleet.request(
        prompt(rng.choice((8, 100, 900)), lora_name=rng.choice(("", "", "x", "y"))),
        model=rng.choice(("m", "n")),
        role=rng.choice((Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE)),
        expected_output_tokens=rng.choice((0, 100)),
        required_labels=rng.choice(({}, {}, {"zone": "a"}, {"zone": "b", "disk": "1"})),
        allowed_workers=some(rng),
        excluded_workers=some(rng),
    )


def test_no_change_of_the_fleet_leaves_exclusions_of_before() -> None:
    for seed in range(20):
        print(f"seed {seed}")  # noqa: T201
        rng = random.Random(seed)
        fleet = Fleet(models=(ModelSettings(name="m", aliases=("n",)),))
        keys = [fleet.add(name, labels={"zone": "ab"[i % 2]}) for i, name in enumerate(NAMES)]
        decider, drained = fleet.core.decider, fleet.core.fleet.drained
        compared = 0
        for _ in range(150):
            match rng.randrange(8):
                case 0:
                    fleet.say(rng.choice(keys), labels=rng.choice(({}, {"zone": "a"})))
                case 1:
                    fleet.say(rng.choice(keys), lora_names=rng.choice(((), ("x",), ("x", "y"))))
                case 2:
                    fleet.say(rng.choice(keys), role=rng.choice(ROLES))
                case 3:
                    fleet.say(rng.choice(keys), max_model_len=rng.choice((0, 500)))
                case 4 if not drained:
                    fleet.core.drain(rng.choice(NAMES))
                case 5:
                    for worker_id in list(drained):
                        fleet.core.undrain(worker_id)
            request = any_request(rng, fleet)
            try:
                decision = fleet.core.decide(request, fleet.now_s)
            except Refusal:
                continue
            output_tokens = decider.output_tokens(request)
            for source, reason in zip(decision.sources, decision.excluded, strict=True):
                if reason != LORA_ELSEWHERE:
                    assert reason == exclusion(request, output_tokens, source, drained)
                    compared += 1
        assert compared > 500


def test_exclusions_of_so_many_kinds_of_requests_are_kept_and_no_more() -> None:
    fleet = Fleet()
    fleet.add("w0", labels={"n": "3"})
    fleet.core.fleet.pools.refresh()
    pool, _ = fleet.core.fleet.pools.live("m", ready=True)
    kept = Exclusions(())
    for n in range(3 * KEPT_MAX):
        request = fleet.request(prompt(8), model="m", required_labels={"n": str(n)})
        reasons = ["labels differ"] if n != 3 else [""]
        assert kept.of(request, 0, pool).reasons == reasons
        assert kept.of(request, 0, pool) is kept.of(request, 0, pool)
        assert len(kept) <= KEPT_MAX


def test_a_request_that_names_many_workers_or_labels_is_looked_up_each_time() -> None:
    fleet = Fleet("w0")
    fleet.core.fleet.pools.refresh()
    pool, _ = fleet.core.fleet.pools.live("m", ready=True)
    exclusions = Exclusions(())
    for field in set(Narrowing._fields) - {"lora_name"}:
        for names in (NARROWING_MAX, NARROWING_MAX + 1):
            named = dict.fromkeys(map(str, range(names)), "")
            value = named if field.endswith("_labels") else frozenset(named)
            request = fleet.request(prompt(8), model="m", **{field: value})
            kept = exclusions.of(request, 0, pool) is exclusions.of(request, 0, pool)
            assert kept is (names == NARROWING_MAX), field
