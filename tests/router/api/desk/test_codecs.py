"""Between the wire and our own types: every field that is read, every answer that is written."""

from typing import Any

import grpc
import pytest

from events.plane.facts import Beat, encode
from indexer.hashing import MultimodalItem, multimodal_hash, pack_tokens
from indexer.identity import WorkerKey
from kvroute.v1 import router_pb2
from router.api.desk import request_codec, statuses, text_codec, worker_codec
from router.api.desk.statuses import STATUS
from router.api.desk.tenant import UNVERIFIED
from router.decide.core.progress import Progress, ProgressState
from router.fleet.reservations.reservations import Ending
from router.request.narrowing import Narrowing
from router.request.refusal import Reason, Refusal
from router.request.request import Request, Role
from router.request.tokens import Item, MadeBy, PromptTokens
from tests.stage.fleet import Fleet, prompt
from tests.stage.served import asked, taken_apart


def read(**about: Any) -> Any:
    fleet = Fleet()
    fleet.add("w0", lora_names=("ad",))
    received = request_codec.receive(asked(**about).SerializeToString(), 1 << 20)
    return request_codec.read_request(received, fleet.core, fleet.now_s)


class TestRequest:
    def test_every_field_that_decides_is_read(self) -> None:
        request = read(
            tokens=20,
            request_id="x",
            model="m",
            lora_name="ad",
            cache_salt="s",
            multimodal_items=[
                router_pb2.MultimodalItem(hash=5, first_token=1, token_count=2),
                router_pb2.MultimodalItem(id="image", first_token=4, token_count=3),
            ],
            expected_output_tokens=9,
            phase=router_pb2.PHASE_PREFILL,
            required_labels={"zone": "north"},
            allowed_worker_ids=["a", "b"],
            excluded_worker_ids=["b"],
            policy="round-robin",
        )
        items = [MultimodalItem(5, 1, 2), MultimodalItem(multimodal_hash("image"), 4, 3)]
        same = prompt(20, lora_name="ad", cache_salt="s", items=items)
        assert request.prompt.fingerprint(16) == same.fingerprint(16)
        assert request.prompt.lora_name == "ad"
        assert (request.request_id, request.model, request.policy) == ("x", "m", "round-robin")
        assert request.role is Role.PREFILL
        assert request.expected_output_tokens == 9
        assert request.narrowing == Narrowing(
            "ad", frozenset({("zone", "north")}), frozenset({"a", "b"}), frozenset({"b"})
        )

    def test_what_is_absent_is_none_and_what_is_zero_is_zero(self) -> None:
        assert read().expected_output_tokens is None
        assert read(expected_output_tokens=0).expected_output_tokens == 0

    @pytest.mark.parametrize(
        ("phase", "role"),
        [
            (router_pb2.PHASE_UNSPECIFIED, Role.BOTH),
            (router_pb2.PHASE_AGGREGATED, Role.BOTH),
            (router_pb2.PHASE_PREFILL, Role.PREFILL),
            (router_pb2.PHASE_DECODE, Role.DECODE),
        ],
    )
    def test_phases_are_roles(self, phase: int, role: Role) -> None:
        assert read(phase=phase).role is role

    def test_a_request_without_an_id_gets_one_of_its_own(self) -> None:
        first, second = read().request_id, read().request_id
        assert first
        assert first != second

    def test_callers_hashes_have_their_salts_in_them(self) -> None:
        hashes = router_pb2.BlockHashes(hashes=[1], block_size=16, prompt_tokens=20)
        request = read(block_hashes=hashes, model="ad", cache_salt="s")
        assert request.prompt.prefixes(16).tolist() == [1]
        assert request.prompt.lora_name == "ad", "who may serve it depends on the LoRA all the same"


class TestText:
    """A text whose tokens the router made is decided as a request with these tokens."""

    def of(self, made: PromptTokens | None = None, **about: Any) -> Request:
        fleet = Fleet()
        received = text_codec.read_text(
            asked(text="some text", **about).SerializeToString(), UNVERIFIED
        )
        if made is not None:
            text_codec.put_tokens(received, made)
        return request_codec.read_request(received, fleet.core, fleet.now_s)

    def test_it_has_the_tokens_and_the_items_that_were_made(self) -> None:
        made = PromptTokens(
            100, MadeBy.ENGINE, token_bytes=pack_tokens(range(100)), items=(Item("image", 4, 3),)
        )
        items = [MultimodalItem(multimodal_hash("image"), 4, 3)]
        same = prompt(100, cache_salt="s", items=items)
        assert self.of(made, cache_salt="s").prompt.fingerprint(16) == same.fingerprint(16)
        own = router_pb2.MultimodalItem(hash=5, first_token=1, token_count=2)
        same = prompt(100, items=[MultimodalItem(5, 1, 2)])
        of_caller = self.of(made, multimodal_items=[own])
        assert of_caller.prompt.fingerprint(16) == same.fingerprint(16), "the caller's count"
        assert of_caller.charged_tokens == 0

    def test_an_estimate_is_a_length_that_is_charged_by_the_text(self) -> None:
        estimated = self.of(PromptTokens(1, MadeBy.ESTIMATE), charged_tokens=99)
        assert (estimated.prompt.token_count, estimated.charged_tokens) == (1, 2)
        assert not len(estimated.prompt.prefixes(1))

    def test_without_tokens_it_is_refused(self) -> None:
        with pytest.raises(Refusal) as refused:
            self.of()
        assert refused.value.reason is Reason.NO_TOKENIZER

    def test_its_size_has_the_tokens_once_however_often_they_are_made(self) -> None:
        content = asked(text="some text").SerializeToString()
        received = text_codec.read_text(content, UNVERIFIED)
        for count in (100, 30):
            made = PromptTokens(count, MadeBy.LOCAL, token_bytes=bytes(4 * count))
            text_codec.put_tokens(received, made)
            assert len(received) == len(content) + 4 * count


class TestProgress:
    @pytest.mark.parametrize("state", list(ProgressState))
    def test_every_state_is_read(self, state: ProgressState) -> None:
        number = router_pb2.ProgressState.Value(f"PROGRESS_STATE_{state.name}")
        message = router_pb2.Progress(reservation_id="r", state=number, output_tokens=3)
        assert request_codec.read_progress(message) == Progress("r", state, output_tokens=3)

    @pytest.mark.parametrize(
        ("name", "ending"),
        [
            ("UNSPECIFIED", Ending.FAILED_UNKNOWN),
            ("WORKER", Ending.FAILED_WORKER),
            ("TIMEOUT", Ending.FAILED_TIMEOUT),
            ("CLIENT", Ending.FAILED_CLIENT),
            ("CANCELLED", Ending.FAILED_CANCELLED),
        ],
    )
    def test_every_failure_is_read(self, name: str, ending: Ending) -> None:
        message = router_pb2.Progress(
            reservation_id="r",
            state=router_pb2.PROGRESS_STATE_FAILED,
            failure_reason=router_pb2.FailureReason.Value(f"FAILURE_REASON_{name}"),
            cached_tokens=0,
        )
        expected = Progress("r", ProgressState.FAILED, 0, 0, ending)
        assert request_codec.read_progress(message) == expected

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            ("", ""), ("length", "length"), ("max_tokens", "length"), ("new word", "other"),
            ("max_output_tokens", "length"), ("custom_tool_call", "tool_calls"),
            ("completed", "stop"), ("failed", "abort"), ("cancelled", "abort"),
        ],
    )  # fmt: skip
    def test_reads_why_an_answer_ended_in_one_set_of_words(self, said: str, reason: str) -> None:
        message = router_pb2.Progress(
            reservation_id="r", state=router_pb2.PROGRESS_STATE_FINISHED, finish_reason=said
        )
        progress = request_codec.read_progress(message)
        assert isinstance(progress, Progress)
        assert progress.finish_reason == reason


class TestStatus:
    @pytest.mark.parametrize("reason", list(Reason))
    def test_every_reason_has_its_code_and_its_details(self, reason: Reason) -> None:
        told = taken_apart(statuses.write_status(Refusal(reason, "a sentence", 1.25)))
        assert told.code is STATUS[reason]
        assert told.code is not grpc.StatusCode.OK
        assert (told.reason, told.domain) == (reason.value, "kvroute")
        assert (told.message, told.retry_s) == ("a sentence", 1.25)
        assert taken_apart(statuses.write_status(Refusal(reason, ""))).retry_s is None

    @pytest.mark.parametrize("letter", ["a", "é", "漢", "\U0001f600"])
    @pytest.mark.parametrize("length", [1, 255, 1021, 1024, 1025, 4000])
    def test_a_message_is_cut_at_a_whole_character(self, letter: str, length: int) -> None:
        message = statuses.write_status(Refusal(Reason.INTERNAL, letter * length)).message
        assert len(message.encode()) <= statuses.MESSAGE_BYTES_MAX
        if len((letter * length).encode()) <= statuses.MESSAGE_BYTES_MAX:
            assert message == letter * length
        else:
            assert message.endswith(letter + "…")
            assert len(message.encode()) > statuses.MESSAGE_BYTES_MAX - 8


class TestWorker:
    def test_a_worker_that_only_beats_can_be_shown(self) -> None:
        fleet = Fleet()
        known = fleet.add("known")
        key = WorkerKey("quiet", 0)
        beat = Beat(1, fleet.relays[known].epoch, 0, 0, 0, True, fleet.now_s)
        fleet.view.on_stream(key, encode(beat), fleet.now_s)
        status = worker_codec.write_worker(fleet.view.sources[key], fleet.core, fleet.now_s)
        assert (status.worker_id, status.model, status.schedulable) == ("quiet", "", False)
        assert status.unschedulable_reason == "no heartbeat yet"
        assert status.stream_state == "live"
        assert not status.HasField("sample_age_s")

    def test_hits_are_shown_against_what_was_predicted(self) -> None:
        fleet = Fleet()
        key = fleet.add("w0")
        fleet.cache(key, prompt(100))
        source = fleet.view.sources[key]
        assert worker_codec.write_worker(source, fleet.core, fleet.now_s).hit_ratio == 0
        held = fleet.route(prompt(100)).reservation
        fleet.report(held, "finished", cached_tokens=48)
        assert worker_codec.write_worker(source, fleet.core, fleet.now_s).hit_ratio == 48 / 96

    def test_preemptions_and_a_token_budget_are_shown_where_they_are_told(self) -> None:
        fleet = Fleet()
        fleet.add("told", preemptions=3, token_budget=8192)
        fleet.add("quiet")
        told, quiet = (
            worker_codec.write_worker(
                fleet.view.sources[WorkerKey(name, 0)], fleet.core, fleet.now_s
            )
            for name in ("told", "quiet")
        )
        assert (told.preemptions, told.token_budget) == (3, 8192)
        assert (quiet.preemptions, quiet.HasField("token_budget")) == (0, False)
