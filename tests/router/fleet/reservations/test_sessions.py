"""Sessions: what is remembered of each, for how long, and that DECODE finds it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.feed.replicas import SESSIONS_MAX, Moved
from indexer.identity import WorkerKey
from kvroute.v1 import router_pb2
from router.api.desk import request_codec
from router.decide.core.progress import Pick, Repeated
from router.decide.decision.pairs import FETCHES_FROM_OTHERS
from router.fleet.reservations.reservations import Reservation
from router.fleet.reservations.sessions import ANNOUNCED_NAME_BYTES_MAX, Sessions
from router.request.refusal import Reason, Refusal
from router.request.request import Request, Role
from tests.stage.fleet import Fleet, hashes, prompt
from tests.stage.served import asked

TTL_S = 100.0
LONG = 1600


def reservation(worker: str = "w0", blocks: int = 2) -> Reservation:
    return Reservation(
        id="r",
        request_id="q",
        worker=WorkerKey(worker, 0),
        fingerprint=(1, 16, "m", "both"),
        prefixes=hashes(range(blocks)),
        own_blocks=0,
        prompt_tokens=16 * blocks,
        predicted_tokens=0,
        new_tokens=0,
        opened_at_s=0.0,
        lease_ends_s=1.0,
        answer=b"",
    )


def put(sessions: Sessions, name: str, now_s: float = 0.0, **about: Any) -> None:
    sessions.put(name, reservation(**about), 16, "", now_s)


class TestMemory:
    def test_a_session_is_where_its_last_request_went(self) -> None:
        sessions = Sessions(TTL_S, 10)
        put(sessions, "a", worker="w0")
        put(sessions, "a", worker="w1", blocks=5)
        known = sessions.get("a")
        assert known is not None
        assert (known.worker.worker_id, known.prompt_tokens, known.model) == ("w1", 80, "m")
        assert len(sessions) == 1
        assert repr(sessions) == "<Sessions 1 known, 40 bytes of hashes>"

    def test_it_is_known_for_its_time_from_the_last_pick_on(self) -> None:
        sessions = Sessions(TTL_S, 10)
        put(sessions, "a", 0.0)
        put(sessions, "b", 1.0)
        put(sessions, "a", 50.0)
        sessions.forget_old(100.999)
        assert sessions.get("b") is not None
        sessions.forget_old(101.0)
        assert sessions.get("b") is None
        assert sessions.get("a") is not None
        assert sessions.forgotten == {"expired": 1}

    def test_the_one_picked_for_longest_ago_makes_room(self) -> None:
        sessions = Sessions(TTL_S, 2)
        for name in ("a", "b", "a", "c"):
            put(sessions, name)
        assert [name for name in "abc" if sessions.get(name)] == ["a", "c"]
        assert sessions.forgotten == {"no_room": 1}

    def test_hashes_have_a_bound_and_a_long_one_may_be_alone(self) -> None:
        sessions = Sessions(TTL_S, 10, hash_bytes_max=8 * 100)
        put(sessions, "a", blocks=60)
        put(sessions, "b", blocks=40)
        assert len(sessions) == 2
        put(sessions, "c", blocks=1)
        assert sessions.get("a") is None
        put(sessions, "d", blocks=500)
        assert len(sessions) == 1
        assert sessions.get("d") is not None

    def test_no_id_is_no_session(self) -> None:
        sessions = Sessions(TTL_S, 1)
        put(sessions, "")
        assert len(sessions) == 0

    @given(
        steps=st.lists(
            st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.integers(0, 60)),
            max_size=60,
        )
    )
    @settings(deadline=None)
    def test_bounds_hold_whatever_happens(self, steps: list[tuple[str, int, int]]) -> None:
        sessions = Sessions(TTL_S, 4, hash_bytes_max=8 * 50)
        now_s = 0.0
        for name, blocks, waited_s in steps:
            now_s += waited_s
            sessions.forget_old(now_s)
            put(sessions, name, now_s, blocks=blocks)
            assert sessions.get(name) is not None
            held = [one.prefixes.nbytes for one in sessions._known.values()]
            assert sessions._hash_bytes == sum(held)
            assert len(held) <= 4
            assert sum(held) <= 8 * 50 or len(held) == 1
            assert all(now_s - one.picked_at_s < TTL_S for one in sessions._known.values())


def fleet_of_halves(**about: Any) -> Fleet:
    """A prefill worker and a decode worker in each of two racks."""
    fleet = Fleet(**about)
    for i in range(2):
        place = {"host": f"h{i}", "rack": f"r{i}"}
        fleet.add(f"p{i}", role="prefill", labels=place)
        fleet.add(f"d{i}", role="decode", labels=place)
    for key in fleet.relays:  # whoever has told nothing yet is believed to hold what was sent
        fleet.cache(key, prompt(32, 900_000))
    return fleet


def read(fleet: Fleet, message: router_pb2.RouteRequest) -> Request:
    received = request_codec.receive(message.SerializeToString(), 1 << 20)
    return request_codec.read_request(received, fleet.core, fleet.now_s)


def resume(fleet: Fleet, session_id: str = "s", **about: Any) -> Pick | Repeated:
    message = router_pb2.RouteRequest(phase=router_pb2.PHASE_DECODE, session_id=session_id, **about)
    return fleet.core.route(read(fleet, message), fleet.now_s)


def begin(fleet: Fleet, worker: str, role: Role = Role.PREFILL) -> None:
    """Session s begins at a worker."""
    here = frozenset({worker})
    fleet.route(prompt(LONG), role=role, session_id="s", allowed_workers=here)


def resumed(fleet: Fleet, session_id: str = "s") -> str:
    """Where a session goes on."""
    return resume(fleet, session_id).reservation.worker.worker_id


def refusal(fleet: Fleet, session_id: str = "s") -> Refusal:
    before = fleet.loads(), repr(fleet.core.reservations)
    with pytest.raises(Refusal) as caught:
        resume(fleet, session_id)
    assert (fleet.loads(), repr(fleet.core.reservations)) == before
    return caught.value


class TestReplicas:
    def one(self) -> Sessions:
        """That others listen to."""
        sessions = Sessions(TTL_S, 4)
        sessions.announces = True
        return sessions

    def test_others_are_told_where_a_session_is_when_that_changes_and_once_a_minute(self) -> None:
        sessions, others = self.one(), Sessions(TTL_S, 4)
        told = []
        for now_s, worker in ((0, "w0"), (1, "w0"), (2, "w1"), (3, "w1"), (62, "w1"), (63, "w1")):
            put(sessions, "a", now_s, worker=worker)
            moved = sessions.take_moved()
            others.hear(moved, now_s)
            told.append([one.worker.worker_id for one in moved])
        assert told == [["w0"], [], ["w1"], [], ["w1"], []]
        assert others.worker_of("a") == WorkerKey("w1", 0)
        assert others.get("a") is None, "its hashes are not told"
        assert (others.elsewhere, others.worker_of("b")) == (1, None)

    def test_a_session_that_was_not_told_yet_is_told_where_it_is_by_then(self) -> None:
        sessions = self.one()
        for worker in ("w0", "w1", "w1"):
            put(sessions, "a", worker=worker)
        assert [one.worker.worker_id for one in sessions.take_moved()] == ["w1"]

    def test_what_came_last_counts_whoever_picked(self) -> None:
        sessions = self.one()
        put(sessions, "a", worker="w0")
        (at_w0,) = sessions.take_moved()
        sessions.hear([at_w0._replace(worker=WorkerKey("w1", 0))], 1.0)
        assert sessions.worker_of("a") == WorkerKey("w1", 0)
        put(sessions, "a", 2.0, worker="w0")
        assert sessions.worker_of("a") == WorkerKey("w0", 0)
        assert sessions.take_moved() == [at_w0], "told so little ago, but overtaken since"
        assert sessions.elsewhere == 0

    def test_a_replica_that_is_met_is_told_of_all_and_nobody_of_those_forgotten(self) -> None:
        sessions = Sessions(TTL_S, 4)
        for name in "abcdef":
            put(sessions, name)
        assert sessions.unannounced == 0, "nobody listens"
        sessions.announce_all()
        put(sessions, "g")
        assert sessions.unannounced == 3
        assert len(sessions.take_moved()) == 3
        assert sessions.take_moved() == []

    def test_a_message_takes_so_many_and_the_next_one_the_others(self) -> None:
        sessions = Sessions(TTL_S, 3 * SESSIONS_MAX)
        for i in range(SESSIONS_MAX + 5):
            put(sessions, f"s{i}")
        sessions.announce_all()
        assert [len(sessions.take_moved()) for _ in range(3)] == [SESSIONS_MAX, 5, 0]
        for i in range(10):
            put(sessions, f"s{i}", worker=f"{i}" * (ANNOUNCED_NAME_BYTES_MAX // 2))
        sessions._unannounced = dict.fromkeys(f"s{i}" for i in range(10))
        assert [len(sessions.take_moved()) for _ in range(6)] == [2, 2, 2, 2, 2, 0]

    def test_what_is_heard_has_a_bound_and_a_time(self) -> None:
        sessions = Sessions(TTL_S, 4)
        sessions.hear([Moved(i, WorkerKey("w0", 0)) for i in range(6)], 0.0)
        assert (sessions.elsewhere, sessions.forgotten["no_room"]) == (4, 2)
        put(sessions, "a", 50.0)
        assert not sessions.due(99.0)
        assert sessions.due(100.0)
        sessions.forget_old(100.0)
        assert (sessions.elsewhere, len(sessions), sessions.forgotten["expired"]) == (0, 1, 4)


class TestDecode:
    @pytest.mark.parametrize("home", ["p0", "p1"])
    def test_decode_goes_near_where_the_session_s_prompt_was_computed(self, home: str) -> None:
        fleet = fleet_of_halves()
        begin(fleet, home)
        pick = resume(fleet)
        assert isinstance(pick, Pick)
        assert pick.reservation.worker.worker_id == home.replace("p", "d")
        assert pick.reservation.prompt_tokens == LONG
        assert pick.reservation.new_tokens == 0, "the prompt is computed already"
        assert pick.decision.policy.name == "decode-room"

    def test_a_session_is_decoded_by_the_revision_that_computed_it(self) -> None:
        fleet = Fleet()
        fleet.add("p0", role="prefill", labels={"revision": "v1"})
        fleet.add("d0", role="decode", labels={"revision": "v1"}, used_blocks=800.0)
        fleet.add("d1", role="decode", labels={"revision": "v2"})
        fleet.route(prompt(LONG), role=Role.PREFILL, session_id="s")
        pick = resume(fleet)
        assert isinstance(pick, Pick)
        assert pick.reservation.worker.worker_id == "d0"
        assert pick.decision.exclusions() == {"role is prefill": 1, FETCHES_FROM_OTHERS: 1}

    def test_that_another_revision_has_the_prompt_cached_too_changes_nothing(self) -> None:
        fleet = Fleet()
        for revision in ("v1", "v2"):
            label = {"revision": revision}
            key = fleet.add(f"p-{revision}", role="prefill", labels=label)
            fleet.cache(key, prompt(LONG))
            used = 800.0 if revision == "v1" else 0.0
            fleet.add(f"d-{revision}", role="decode", labels=label, used_blocks=used)
        begin(fleet, "p-v1")
        assert resumed(fleet) == "d-v1"

    def test_decode_stays_where_the_cache_is(self) -> None:
        fleet = fleet_of_halves()
        begin(fleet, "d1", Role.DECODE)
        assert {resumed(fleet) for _ in range(3)} == {"d1"}

    def test_what_the_events_told_counts_and_not_where_it_was_sent(self) -> None:
        fleet = fleet_of_halves(predicted_ttl_s=0.0)
        begin(fleet, "p0")
        fleet.cache(WorkerKey("p1", 0), prompt(LONG))
        assert resumed(fleet) == "d1"

    def test_nobody_holds_it_any_more(self) -> None:
        fleet = fleet_of_halves(predicted_ttl_s=0.0)
        key = WorkerKey("p0", 0)
        begin(fleet, "p0")
        fleet.cache(key, prompt(LONG))
        assert resumed(fleet) == "d0"
        fleet.clear(key)
        told = refusal(fleet)
        assert told.reason is Reason.UNKNOWN_SESSION
        assert "no worker holds session 's' any more" in told.message

    def test_a_prompt_that_fills_no_block_is_where_it_was_sent(self) -> None:
        fleet = fleet_of_halves()
        fleet.route(prompt(9), role=Role.DECODE, session_id="s")
        first = resume(fleet).reservation.worker
        assert resume(fleet).reservation.worker == first
        fleet.core.remove(first.worker_id, 60.0, fleet.now_s)
        assert refusal(fleet).reason is Reason.UNKNOWN_SESSION

    def test_a_stream_that_can_t_be_trusted_denies_nothing(self) -> None:
        fleet = fleet_of_halves(predicted_ttl_s=0.0)
        begin(fleet, "p1")
        key = WorkerKey("p1", 0)
        assert refusal(fleet).reason is Reason.UNKNOWN_SESSION
        fleet.tell(key, lost=True)
        fleet.beat(key)
        assert resumed(fleet) == "d1"

    def test_an_unknown_session_is_not_found(self) -> None:
        fleet = fleet_of_halves()
        fleet.route(prompt(LONG), role=Role.PREFILL, session_id="s")
        assert refusal(fleet, "t").reason is Reason.UNKNOWN_SESSION
        assert refusal(fleet, "").reason is Reason.UNKNOWN_SESSION

    def test_it_expires(self) -> None:
        fleet = fleet_of_halves(session_ttl_s=10.0)
        fleet.route(prompt(LONG), role=Role.PREFILL, session_id="s")
        fleet.turn(9.0)
        assert fleet.core.fleet.sessions.get("s")
        fleet.turn(1.0)
        assert refusal(fleet).reason is Reason.UNKNOWN_SESSION

    def test_a_pair_s_session_is_where_it_decodes(self) -> None:
        fleet = fleet_of_halves()
        pick = fleet.route(prompt(LONG), role=Role.PAIR, session_id="s")
        known = fleet.core.fleet.sessions.get("s")
        assert known is not None
        assert known.worker == pick.reservation.worker

    def test_the_same_decode_again_gets_the_same_answer(self) -> None:
        fleet = fleet_of_halves()
        fleet.route(prompt(LONG), role=Role.PREFILL, session_id="s")
        first = resume(fleet, request_id="x")
        again = resume(fleet, request_id="x")
        assert isinstance(again, Repeated)
        assert again.reservation is first.reservation

    def test_it_is_of_the_session_s_model(self) -> None:
        fleet = Fleet()
        fleet.add("a", model="alpha")
        fleet.add("b", model="beta")
        fleet.route(prompt(LONG), model="beta", session_id="s")
        assert resumed(fleet) == "b"

    def test_what_it_reserves_ends_like_all_else(self) -> None:
        fleet = fleet_of_halves()
        fleet.route(prompt(LONG), role=Role.PREFILL, session_id="s")
        before = fleet.loads()
        pick = resume(fleet)
        fleet.report(pick.reservation, "finished")
        assert fleet.loads() == before

    def test_a_prompt_counts_for_more_than_the_session(self) -> None:
        fleet = fleet_of_halves()
        message = asked(100, phase=router_pb2.PHASE_DECODE, session_id="unheard-of")
        request = read(fleet, message)
        assert request.resumed is None
        assert isinstance(fleet.core.route(request, fleet.now_s), Pick)


class TestSticky:
    def test_a_session_that_had_to_move_stays_where_it_went(self) -> None:
        fleet = Fleet("w0", "w1", "w2", "w3", policy="session-sticky")

        def picked() -> str:
            pick = fleet.route(prompt(64), session_id="s")
            fleet.report(pick.reservation, "finished")
            return pick.reservation.worker.worker_id

        home = picked()
        fleet.core.drain(home)
        moved = picked()
        assert moved != home
        fleet.core.undrain(home)
        assert {picked() for _ in range(3)} == {moved}
