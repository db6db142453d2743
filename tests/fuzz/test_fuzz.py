"""The fuzzer: its corpus and a few thousand inputs in every test run, and that it finds faults."""

import pytest

from kvroute.v1 import router_pb2
from router.request.wire.received import ReceivedRequest
from tests.fuzz import wire
from tests.fuzz.fuzzer import Failure, Fuzzer
from tests.fuzz.inputs import varint


@pytest.fixture(scope="module")
def fuzzer() -> Fuzzer:
    return Fuzzer(seed=17)


def test_no_reader_differs_on_the_corpus(fuzzer: Fuzzer) -> None:
    for name, content in fuzzer.corpus():
        fuzzer.run(name, content)
    assert fuzzer.failures == []
    assert set(fuzzer.runs) == set(fuzzer.readers)


def test_no_reader_differs_on_random_inputs(fuzzer: Fuzzer) -> None:
    fuzzer.rounds(300)
    assert fuzzer.failures == []


def test_the_same_seed_gives_the_same_inputs() -> None:
    one, other = Fuzzer(3), Fuzzer(3)
    one.rounds(20)
    other.rounds(20)
    assert {name: one.make(name) for name in one.readers} == {
        name: other.make(name) for name in other.readers
    }


def test_a_wrong_reader_is_caught_and_its_input_made_short(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = wire.read_request

    def wrong(content: bytes, *bounds: int) -> ReceivedRequest:
        read = right(content, *bounds)
        read.data = read.data[:-1] if len(read.data) > 2 else read.data
        return read

    monkeypatch.setattr(wire, "read_request", wrong)
    content = router_pb2.RouteRequest(
        request_id="a" * 50, token_bytes=bytes(40)
    ).SerializeToString()
    faulty = Fuzzer(0)
    faulty.run("route", content)
    (failure,) = faulty.failures
    short = faulty.shortened(failure)
    assert len(short.content) < len(content) - 10
    assert "the prompt" in short.error
    assert short == Failure("route", short.content, short.error)


def test_overlong_varints_stay_varints() -> None:
    assert varint(300) == b"\xac\x02"
    assert varint(1, longer=2) == b"\x81\x80\x00"
