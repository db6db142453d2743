"""Which prefixes are copied where: by hand, and what never happens."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from events.plane.facts import WARM_TOKENS_MAX, Unreadable, Warm, decode, encode
from indexer.hashing import MultimodalItem, block_hashes, pack_tokens
from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from router.config.settings.routing_settings import HotPrefixSettings
from router.decide.copies.copies import UNDER_WAY_MAX, Cancel, Copy, CopyFate
from router.decide.copies.hot_prefixes import (
    BUSY_REQUESTS,
    CONSIDER_S,
    CONSIDERED_MAX,
    HOT_MAX,
    HOT_SCORE,
    REASONS,
    Effect,
    Means,
    carried,
    depths,
    recomputed,
)
from router.observe.metrics.families import export
from router.observe.metrics.of_copies import hot_prefix_metrics
from router.request.prompt import Prompt
from router.request.request import Role
from tests.stage.fleet import Fleet, prompt
from tests.stage.narrowings import CASES, FIELDS

TEXT_TOKENS = 1024
BUSY = 20
RATE = 1000.0
"""Prompt tokens a second: the text takes 1.024 s."""


class HotFleet(Fleet):
    """Four workers of a fleet that copies hot prefixes; `a` holds a text, and is busy."""

    def __init__(
        self,
        means: Means | None = None,
        *,
        native: bool = False,
        score: float = HOT_SCORE,
        queue: int = BUSY_REQUESTS,
    ) -> None:
        super().__init__(
            # The default has requests for the text spread before it is hot.
            policy="dynamo-unguarded",
            index=NativeIndex() if native else None,
            prefill_rate=RATE,
            hot_prefixes=HotPrefixSettings(enabled=True),
            copy_means=means,
        )
        self.hot.hot_score, self.hot.busy_requests = score, queue
        self.a, self.b, self.c, self.d = (self.add(one, warms=True) for one in "abcd")
        self.cache(self.a, prompt(TEXT_TOKENS))
        self.say(self.a, running=BUSY)

    def ask(self, times: int = 4, first: int = 0, **about: object) -> None:
        """Requests for the text, each with an end of its own; they don't stay."""
        for _ in range(times):
            own_end = [10**6 + self._requests] * 40
            text = pack_tokens([*range(first, first + TEXT_TOKENS), *own_end])
            self.ask_for(Prompt.from_tokens(text), 1, **about)

    def ask_for(self, of: Prompt, times: int = 4, **about: object) -> None:
        """Requests for one prompt, which don't stay."""
        for _ in range(times):
            self.core.withdraw(self.route(of, **about).reservation, self.now_s)

    def effects(self) -> list[Effect]:
        return self.hot.decide(self.now_s)

    def copy(self) -> Copy:
        """The one copy that is decided now."""
        (effect,) = self.effects()
        assert isinstance(effect, Copy)
        return effect

    def reasons(self) -> dict[str, int]:
        """Why there is no copy now."""
        before = self.hot.reasons.copy()
        assert self.effects() == []
        return dict(self.hot.reasons - before)


@pytest.fixture
def fleet() -> HotFleet:
    return HotFleet()


@pytest.mark.parametrize("native", [False, True])
def test_a_hot_prefix_of_a_busy_holder_is_copied_to_whoever_has_least(native: bool) -> None:
    fleet = HotFleet(native=native)
    fleet.say(fleet.b, running=3)
    fleet.say(fleet.c, running=1)
    fleet.say(fleet.d, running=2)
    fleet.ask()
    copy = fleet.copy()
    assert (copy.target, copy.source) == (fleet.c, fleet.a)
    assert copy.prefix.token_count == TEXT_TOKENS
    assert copy.prefix.token_bytes == pack_tokens(range(TEXT_TOKENS))
    # 4 hits in at least 1 s: 240 in the next minute, half of them at the new holder
    assert copy.benefit_s == pytest.approx(120 * 1.024)
    assert copy.cost_s == pytest.approx(1.024)


def test_one_hit_too_few_is_not_hot(fleet: HotFleet) -> None:
    fleet.ask(3)
    assert fleet.reasons() == {}
    assert len(fleet.hot) == 0
    fleet.ask(1)
    assert len(fleet.copy().prefix.chain) == TEXT_TOKENS // 16


def test_a_transfer_costs_its_time_and_5_ms_and_must_bring_half_as_much_more() -> None:
    benefit_s = 120 * 1.024
    for cost_s, worth_it in ((benefit_s / 1.5 + 0.001, False), (benefit_s / 1.5 - 0.001, True)):
        fleet = HotFleet(carried(lambda n: n / RATE, lambda _n, _d, t=cost_s: t - 0.005))  # type: ignore[misc]
        fleet.ask()
        if worth_it:
            assert fleet.copy().cost_s == pytest.approx(cost_s)
        else:
            assert fleet.reasons() == {"not_worth_it": 1}


def test_a_transfer_is_priced_by_the_distance_of_the_nearest_holder() -> None:
    asked: list[tuple[int, int]] = []

    def transfer_s(tokens: int, distance: int) -> float:
        asked.append((tokens, distance))
        return 0.1 * (1 + distance)

    fleet = HotFleet(carried(lambda n: n / RATE, transfer_s))
    fleet.cache(fleet.b, prompt(TEXT_TOKENS))
    fleet.say(fleet.a, labels={"cluster": "x", "rack": "1"})
    fleet.say(fleet.b, labels={"cluster": "x", "rack": "2"}, running=BUSY)
    fleet.say(fleet.c, labels={"cluster": "x", "rack": "2"})
    fleet.say(fleet.d, running=5)
    fleet.ask()
    copy = fleet.copy()
    assert (copy.target, copy.source) == (fleet.c, fleet.b)
    assert asked == [(TEXT_TOKENS, 1)]
    assert copy.cost_s == pytest.approx(0.205)
    # 240 requests in the next minute, over three holders
    assert copy.benefit_s == pytest.approx(80 * 1.024)


def test_what_the_target_holds_already_is_not_paid_for(fleet: HotFleet) -> None:
    fleet.cache(fleet.b, prompt(TEXT_TOKENS), 768)
    fleet.say(fleet.c, running=5)
    fleet.say(fleet.d, running=5)
    fleet.ask()
    copy = fleet.copy()
    assert copy.target == fleet.b
    assert copy.cost_s == pytest.approx(0.256)


def test_where_there_is_no_way_there_is_no_copy() -> None:
    fleet = HotFleet(carried(lambda n: n / RATE, lambda _n, _d: inf))
    fleet.ask()
    assert fleet.reasons() == {"not_worth_it": 1}


def test_as_long_as_one_holder_has_time_nothing_is_copied(fleet: HotFleet) -> None:
    fleet.cache(fleet.b, prompt(TEXT_TOKENS))
    fleet.say(fleet.b, running=10)
    fleet.ask()
    assert fleet.reasons() == {"holders_not_busy": 1}


def test_all_alike_are_not_busy_however_much_they_have(fleet: HotFleet) -> None:
    for key in (fleet.a, fleet.b, fleet.c, fleet.d):
        fleet.say(key, running=50)
    fleet.ask()
    assert fleet.reasons() == {"holders_not_busy": 1}


def test_a_prefix_that_nobody_holds_is_not_copied(fleet: HotFleet) -> None:
    fleet.ask()
    for source in fleet.view.sources.values():
        fleet.view.index.clear(source.slot)
    assert fleet.reasons() == {"not_held": 1}


def test_a_holder_that_is_drained_is_as_good_as_none(fleet: HotFleet) -> None:
    fleet.say(fleet.a, running=0)
    fleet.ask(8)
    assert fleet.reasons() == {"holders_not_busy": 1}
    fleet.core.drain("a")
    fleet.now_s += 1.0
    copy = fleet.copy()
    assert copy.source == fleet.a
    assert copy.target != fleet.a


EXCLUDED: dict[str, Callable[[HotFleet, WorkerKey], object]] = {
    "drained": lambda fleet, key: fleet.core.drain(key.worker_id),
    "busy": lambda fleet, key: fleet.say(key, running=12),
    "unhealthy": lambda fleet, key: fleet.say(key, healthy=False),
    "full": lambda fleet, key: fleet.say(key, total_slots=5, running=5),
    "decode only": lambda fleet, key: fleet.say(key, role="decode"),
    "other model": lambda fleet, key: fleet.say(key, model="other"),
    "too short": lambda fleet, key: fleet.say(key, max_model_len=TEXT_TOKENS),
    "other block size": lambda fleet, key: fleet.say(key, block_size=32),
    "not allowed by its relay": lambda fleet, key: fleet.say(key, warms=False),
    "removed": lambda fleet, key: fleet.core.remove(key.worker_id, 60.0, fleet.now_s),
}


@pytest.mark.parametrize("why", EXCLUDED)
def test_an_excluded_worker_gets_no_copy(why: str, fleet: HotFleet) -> None:
    fleet.ask(model="m")
    for key in (fleet.b, fleet.c, fleet.d):
        EXCLUDED[why](fleet, key)
    assert fleet.reasons() in ({"no_target": 1}, {"holders_not_busy": 1})
    assert fleet.hot.copies.fates == {}


def test_a_silent_worker_gets_no_copy(fleet: HotFleet) -> None:
    fleet.ask(20)
    fleet.turn(4.0, silent=[fleet.b, fleet.c])
    assert fleet.copy().target == fleet.d


def test_a_lora_goes_to_workers_that_have_it_only(fleet: HotFleet) -> None:
    of = prompt(TEXT_TOKENS + 40, lora_name="ad", cache_salt="tenant")
    fleet.cache(fleet.a, of)
    for key in (fleet.a, fleet.b, fleet.c, fleet.d):
        fleet.say(key, lora_names=("ad",) if key in (fleet.a, fleet.d) else ("other",))
    fleet.ask_for(of)
    copy = fleet.copy()
    assert copy.target == fleet.d
    assert (copy.prefix.lora_name, copy.prefix.cache_salt) == ("ad", "tenant")


@pytest.mark.parametrize("field", FIELDS)
def test_a_text_is_copied_to_no_worker_that_may_not_see_it(field: str) -> None:
    fleet, case = HotFleet(), CASES[field]
    of = prompt(TEXT_TOKENS + 40, lora_name=case.narrowing.lora_name)
    fleet.cache(fleet.a, of)
    fleet.say(fleet.a, **case.fit)
    for key in (fleet.b, fleet.c, fleet.d):
        fleet.say(key, **case.unfit)
    fleet.ask_for(of, narrowing=case.narrowing)
    # Excluded workers failed, and may see it.
    assert bool(fleet.effects()) is (field == "excluded_workers")


def test_a_text_of_a_decode_half_is_not_counted(fleet: HotFleet) -> None:
    fleet.ask(role=Role.DECODE)
    assert len(fleet.hot.rates) == 0


def test_of_a_pair_the_worker_that_computes_the_prompt_counts(fleet: HotFleet) -> None:
    fleet.say(fleet.a, role="prefill")
    fleet.say(fleet.b, role="decode")
    fleet.say(fleet.c, role="prefill", running=9)
    fleet.say(fleet.d, role="decode")
    fleet.ask(4, role=Role.PAIR)
    copy = fleet.copy()
    assert (copy.target, copy.source) == (fleet.c, fleet.a)


def test_hashes_and_images_can_be_carried_but_not_computed_again() -> None:
    def reasons_or_copy(means: Means, of: Prompt) -> list[str]:
        fleet = HotFleet(means)
        fleet.cache(fleet.a, of)
        fleet.ask_for(of)
        return [*("copy" for _ in fleet.effects()), *fleet.hot.reasons]

    whole = prompt(TEXT_TOKENS + 40)
    hashes = Prompt.from_hashes(whole.prefixes(16), 16, TEXT_TOKENS + 40)
    image = prompt(TEXT_TOKENS + 40, items=[MultimodalItem(5, 100, 20)])
    by_link = carried(lambda n: n / RATE, lambda _n, _d: 0.1)
    for of in (hashes, image):
        assert reasons_or_copy(by_link, of) == ["copy"]
        assert reasons_or_copy(recomputed(RATE), of) == ["tokens_unknown"]


def hashes_of_the_text() -> Prompt:
    hashes = block_hashes(pack_tokens(range(TEXT_TOKENS)), 16)
    return Prompt.from_hashes(hashes, 16, TEXT_TOKENS)


def test_a_prefix_of_hashes_is_copied_once_a_request_brings_its_tokens(fleet: HotFleet) -> None:
    fleet.ask_for(hashes_of_the_text())
    assert set(fleet.reasons()) == {"tokens_unknown"}
    fleet.ask(1)
    fleet.now_s += CONSIDER_S
    assert fleet.copy().prefix.token_bytes == pack_tokens(range(TEXT_TOKENS))
    assert fleet.hot.byte_count == sum(hot.prefix.byte_count for hot in fleet.hot._hot.values())


def test_tokens_that_come_later_are_bounded_as_well(fleet: HotFleet) -> None:
    fleet.ask_for(hashes_of_the_text())
    fleet.hot.bytes_max = fleet.hot.byte_count
    fleet.ask(1)
    assert fleet.hot.byte_count <= fleet.hot.bytes_max


def test_a_worker_takes_one_copy_at_a_time_and_the_same_one_once_a_minute(fleet: HotFleet) -> None:
    other = prompt(TEXT_TOKENS + 40, 50_000)
    fleet.cache(fleet.a, other)
    for key in (fleet.c, fleet.d):
        fleet.say(key, running=BUSY)
    for _ in range(30):
        fleet.ask(1)
        fleet.ask_for(other, 1)
    first = fleet.copy()
    assert first.target == fleet.b
    assert fleet.hot.reasons["no_target"] == 1
    fleet.now_s += 1.0
    fleet.hot.ended(first, False, fleet.now_s)
    second = fleet.copy()
    assert second.target == fleet.b
    assert second.prefix.key != first.prefix.key


def test_a_copy_that_is_done_counts_from_then_on(fleet: HotFleet) -> None:
    fleet.ask(20)
    copy = fleet.copy()
    assert fleet.effects() == []  # weighed a moment ago
    fleet.now_s += 1.0
    fleet.hot.ended(copy, True, fleet.now_s)
    fleet.cache(copy.target, prompt(TEXT_TOKENS))
    assert fleet.reasons() == {"holders_not_busy": 1}
    fleet.ask(1)  # goes there, since it holds the text and has time
    assert fleet.hot.copies.fates[CopyFate.USED] == 1


def test_a_worker_without_events_holds_a_copy_as_far_as_we_know(fleet: HotFleet) -> None:
    fleet.say(fleet.b, events=False)
    for key in (fleet.c, fleet.d):
        fleet.say(key, running=5)
    fleet.ask()
    copy = fleet.copy()
    assert copy.target == fleet.b
    fleet.hot.ended(copy, True, fleet.now_s)
    assert fleet.route(prompt(TEXT_TOKENS + 40, 0)).decision.tokens[0].tolist()[1] == TEXT_TOKENS


def test_a_copy_that_was_evicted_before_its_first_use_is_useless(fleet: HotFleet) -> None:
    fleet.ask()
    copy = fleet.copy()
    fleet.hot.ended(copy, True, fleet.now_s)
    fleet.cache(copy.target, prompt(TEXT_TOKENS))
    fleet.turn(6.0)
    fleet.effects()
    assert fleet.hot.copies.fates[CopyFate.USELESS] == 0
    fleet.clear(copy.target)
    fleet.turn(6.0)
    fleet.effects()
    assert fleet.hot.copies.fates[CopyFate.USELESS] == 1


@pytest.mark.parametrize("why", ["drained", "busy", "unhealthy", "removed"])
def test_a_copy_under_way_to_a_worker_that_becomes_excluded_is_cancelled(why: str) -> None:
    fleet = HotFleet()
    fleet.ask()
    copy = fleet.copy()
    EXCLUDED[why](fleet, copy.target)
    effects = fleet.effects()
    assert isinstance(effects[0], Cancel)
    assert effects[0].copy is copy
    fleet.hot.ended(copy, True, fleet.now_s)  # too late
    assert fleet.hot.copies.fates[CopyFate.DONE] == 0


def test_a_longer_prefix_carries_the_shorter_ones_along(fleet: HotFleet) -> None:
    fleet.ask()
    assert len(fleet.hot) == 2  # 512 and 1,024 tokens
    assert fleet.copy().prefix.token_count == TEXT_TOKENS


def test_a_beginning_that_many_texts_share_is_copied_by_itself() -> None:
    fleet = HotFleet(score=3.0)
    for own in range(6):
        tokens = [*range(512), *range(10_000 * (own + 1), 10_000 * (own + 1) + 560)]
        of = Prompt.from_tokens(pack_tokens(tokens))
        fleet.cache(fleet.a, of, 1024)
        fleet.ask_for(of, 3)
    lengths = [one.prefix.token_count for one in fleet.effects() if isinstance(one, Copy)]
    assert 512 in lengths


def test_cold_prefixes_are_let_go(fleet: HotFleet) -> None:
    fleet.ask()
    kept = fleet.hot.byte_count
    assert kept == (64 + 32) * 8 + (1024 + 512) * 4
    fleet.turn(30.0)
    fleet.effects()
    assert (len(fleet.hot), fleet.hot.byte_count) == (0, 0)


def test_of_a_text_too_long_for_a_message_the_beginning_is_copied(fleet: HotFleet) -> None:
    of = prompt(WARM_TOKENS_MAX + 5000)
    fleet.cache(fleet.a, of)
    fleet.ask_for(of)
    copy = fleet.copy()
    assert copy.prefix.token_count == 1 << 17
    warm = Warm(id="x" * 100, tokens=copy.prefix.token_bytes or b"")
    assert decode(Warm, encode(warm)) == warm
    assert isinstance(decode(Warm, encode(Warm(id="x", tokens=bytes(1_000_004)))), Unreadable)


def test_hot_prefixes_are_bounded_in_number_and_the_hotter_half_stays() -> None:
    fleet = HotFleet(score=1.0)
    for i in range(HOT_MAX + 3):  # each a prefix of 512 tokens, the last ones hotter
        fleet.ask_for(prompt(528, 10_000 * i), 1 + (i > HOT_MAX // 2))
    assert len(fleet.hot) == HOT_MAX
    assert fleet.hot.reasons["no_room"] > 0
    fleet.effects()
    assert 0 < len(fleet.hot) < HOT_MAX


def test_hot_prefixes_are_bounded_in_bytes() -> None:
    fleet = HotFleet(score=1.0)
    fleet.hot.bytes_max = 1 << 20
    for i in range(40):
        fleet.ask_for(prompt(16_400, 20_000 * i), 1)
        assert fleet.hot.byte_count <= 1 << 20
    assert fleet.hot.reasons["no_room"] > 0


def test_each_decision_weighs_so_many_at_most() -> None:
    fleet = HotFleet(score=1.0)
    for i in range(3 * CONSIDERED_MAX):
        fleet.ask_for(prompt(528, 10_000 * i), 1)
    weighed = []
    for _ in range(4):
        fleet.effects()
        weighed.append(fleet.hot.reasons.total() + fleet.hot.copies.fates[CopyFate.BEGUN])
    assert weighed == [16, 32, 48, 48]


def test_switched_off_nothing_is_counted() -> None:
    fleet = Fleet("a")
    for _ in range(10):
        fleet.route(prompt(1024))
    assert not fleet.hot.enabled
    assert len(fleet.hot.rates) == 0
    assert not fleet.core.keeps_tokens


@pytest.mark.parametrize(
    ("blocks", "held", "size", "lengths"),
    [
        (31, 31, 16, []),
        (32, 0, 16, [32]),
        (200, 100, 16, [32, 64, 128, 100]),
        (200, 128, 16, [32, 64, 128]),
        (200, 20, 16, [32, 64, 128]),
        (5, 3, 1024, [1, 2, 4, 3]),
    ],
)
def test_beginnings_are_counted_at_doubling_lengths_and_where_prompts_part(
    blocks: int, held: int, size: int, lengths: list[int]
) -> None:
    assert depths(blocks, held, size) == lengths


WORKERS = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2)),
    st.tuples(st.just("load"), WORKERS, st.integers(0, 40)),
    st.tuples(st.sampled_from(["drain", "undrain"]), WORKERS),
    st.tuples(st.sampled_from(["done", "failed"]), st.integers(0, 7)),
    st.tuples(st.just("turn"), st.floats(0.1, 3.0)),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=60, deadline=None)
@example([("ask", 1), ("ask", 1), ("drain", 2), ("turn", 1.0)])
def test_the_laws_hold_whatever_comes(steps: list[tuple[Any, ...]]) -> None:
    fleet = HotFleet(score=1.0, queue=2)
    workers = [fleet.a, fleet.b, fleet.c, fleet.d]
    copies, fates = fleet.hot.copies, fleet.hot.copies.fates
    for step in steps:
        match step:
            case "ask", text:
                if len(fleet.core.fleet.drained) < 4:
                    fleet.ask(1, 5000 * text)
            case "load", worker, running:
                fleet.say(workers[worker], running=running)
            case "drain" | "undrain" as change, worker:
                getattr(fleet.core, change)(workers[worker].worker_id)
            case "done" | "failed" as end, nth:
                for copy in list(copies.under_way.values())[nth : nth + 1]:
                    fleet.hot.ended(copy, end == "done", fleet.now_s)
                    if end == "done":
                        fleet.store(copy.target, copy.prefix.chain)
            case "turn", seconds:
                fleet.turn(seconds)
        for effect in fleet.effects():
            if isinstance(effect, Copy):
                source = fleet.view.sources[effect.target]
                assert fleet.core.fleet.excluded(source) == ""
                assert effect.target != effect.source
                queue = fleet.core.fleet.load_of(effect.target).active_requests()
                # A holder that gets no requests at all, such as a drained one, need not be busy.
                gets_none = fleet.core.fleet.excluded(fleet.view.sources[effect.source])
                assert (
                    gets_none or queue < fleet.core.fleet.load_of(effect.source).active_requests()
                )
        under_way = [copy.target for copy in copies.under_way.values()]
        assert len(under_way) == len(set(under_way)) <= UNDER_WAY_MAX
        ended = sum(fates[one] for one in (CopyFate.DONE, CopyFate.FAILED, CopyFate.CANCELLED))
        assert fates[CopyFate.BEGUN] == ended + len(under_way)
        unused = len(copies.waiting(0.0, fleet.now_s))
        assert fates[CopyFate.DONE] == fates[CopyFate.USED] + fates[CopyFate.USELESS] + unused
        assert set(fleet.hot.reasons) <= set(REASONS)


def test_metrics_tell_what_became_of_copies(fleet: HotFleet) -> None:
    registry = CollectorRegistry()
    export(registry, hot_prefix_metrics, fleet.hot)
    fates = "kvroute_hot_prefix_copies_total"
    for fate in CopyFate:
        assert registry.get_sample_value(fates, {"fate": fate, "reason": ""}) == 0
    fleet.ask()
    fleet.hot.ended(fleet.copy(), False, fleet.now_s)
    assert registry.get_sample_value(fates, {"fate": "begun", "reason": ""}) == 1
    assert registry.get_sample_value(fates, {"fate": "failed", "reason": ""}) == 1
    assert registry.get_sample_value(fates, {"fate": "withheld", "reason": "no_target"}) == 0
    assert registry.get_sample_value("kvroute_known", {"what": "hot_prefixes"}) == 2
    labels = {"what": "hot_prefixes", "port": ""}
    assert registry.get_sample_value("kvroute_held_bytes", labels) == fleet.hot.byte_count
    labels = {"what": "hot_prefixes", "reason": "no_room"}
    assert registry.get_sample_value("kvroute_forgotten_total", labels) == 0


def test_what_is_switched_off_lets_go_of_all_and_counts_on_later(fleet: HotFleet) -> None:
    fleet.ask()
    copy = fleet.copy()
    (effect,) = fleet.hot.forget()
    assert isinstance(effect, Cancel)
    assert effect.copy is copy
    assert (len(fleet.hot), fleet.hot.byte_count, len(fleet.hot.rates)) == (0, 0, 0)
    assert fleet.hot.copies.fates == {CopyFate.BEGUN: 1, CopyFate.CANCELLED: 1}
    assert fleet.effects() == []
    fleet.turn(60.0)
    fleet.say(fleet.a, running=BUSY)
    fleet.ask()
    fleet.copy()
    assert fleet.hot.copies.fates[CopyFate.BEGUN] == 2


def test_less_room_than_before_is_kept_within_by_the_hottest(fleet: HotFleet) -> None:
    for i in range(260):  # some 4 KiB of tokens each, and hashes
        fleet.ask(first=10_000 * (i + 1))
    before = fleet.hot.byte_count
    assert before > 1 << 20
    fleet.hot.bytes_max = 1 << 20
    fleet.effects()
    assert before // 2 < fleet.hot.byte_count <= 1 << 20


def test_switched_off_there_are_no_metrics_of_it() -> None:
    assert list(hot_prefix_metrics(Fleet().hot)) == []
