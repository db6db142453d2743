"""What `kvroute top` makes of a router's state."""

import io
import re

import pytest
from rich.console import Console

from events.feed.stream import CONNECTION_DOWN
from kvroute.v1 import ListQueueResponse, Observed, WorkerStatus
from router.app.calls.fleet import reused_text
from router.app.calls.gain import Gain, gain_text, gains
from router.app.calls.top_screen import State, screen


def worker(worker_id: str, ended: int = 0, **about: object) -> WorkerStatus:
    status = WorkerStatus(worker_id=worker_id, schedulable=True, stream_state="live", **about)
    status.outcomes["finished"] = ended
    return status


def text_of(state: State, height: int = 40, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(state, height, width))
    return console.export_text()


def test_requests_a_second_are_of_workers_that_were_there_before() -> None:
    state = State("r:1")
    state.look([worker("a", 10)], ListQueueResponse(), 100.0)
    assert state.ended_a_s is None
    state.look([worker("a", 30), worker("b", 500)], ListQueueResponse(), 104.0)
    assert state.ended_a_s == 5.0
    state.look([worker("b", 501)], ListQueueResponse(), 105.0)
    assert state.ended_a_s == 1.0


def test_troubles_are_said_until_they_are_over() -> None:
    state = State("r:1", trouble="old numbers: away", unwatched="no decisions: denied")
    assert "old numbers: away; no decisions: denied" in text_of(state)
    state.trouble = ""
    assert "no decisions: denied" in text_of(state)
    state.unwatched = ""
    assert "q: quit" in text_of(state)


def test_a_lost_connection_to_nats_is_said_while_every_stream_lacks_it() -> None:
    state = State("r:1")
    lost = [worker(name, stream_reason=CONNECTION_DOWN) for name in ("a", "b")]
    state.look(lost, ListQueueResponse(), 0.0)
    assert "has lost its connection to NATS" in text_of(state)
    lost[1].stream_reason = "in step"
    assert "NATS" not in text_of(state)
    state.look([], ListQueueResponse(), 1.0)
    assert "NATS" not in text_of(state)


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.0, "-"), (0.31, "31%"), (1.0, "100%"), (1.14, ">100%"), (7.0, ">100%")]
)
def test_a_share_is_100_percent_at_most(ratio: float, text: str) -> None:
    assert reused_text(ratio) == text


def test_a_low_terminal_shows_the_workers_that_need_attention() -> None:
    workers = [worker(f"w{i:03}") for i in range(100)]
    workers[70].schedulable = False
    workers[70].unschedulable_reason = "silent"
    workers[80].running = 9
    state = State("r:1")
    state.look(workers, ListQueueResponse(waiting=3), 0.0)
    lines = text_of(state, height=10).splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("w0")]
    assert shown[:2] == ["w070", "w080"]
    assert "and 97 more, in less need of attention" in "\n".join(lines)
    assert "99 of 100 workers serve" in lines[0]
    assert "3 waiting" in lines[0]


def test_a_narrow_terminal_cuts_no_name() -> None:
    state = State("r:1")
    state.look([worker("gpu-node-17", model="m")], ListQueueResponse(), 0.0)
    narrow, wide = text_of(state, width=80), text_of(state)
    assert "gpu-node-17" in narrow
    assert "held" in wide
    assert "held" not in narrow


def observed(worker_id: str, picks: int, **about: float) -> WorkerStatus:
    status = worker(worker_id, model="llama")
    tokens = {"prompt_tokens": 100 * picks, "prompt_tokens_today": 1000}
    status.observed.MergeFrom(Observed(picks=picks, **tokens | about))
    return status


def test_a_model_that_another_router_serves_has_its_gain_in_a_line() -> None:
    first = {"first_tokens_today": 30, "ttft_error": 0.25}
    workers = [
        observed(
            *("a", 30),
            **{"cached_tokens": 2700, "cached_share_today": 0.6, "ttft_ms_today": 900.0},
            **{"estimated_ttft_ms": 300.0, "estimated_picks": 15} | first,
        ),
        observed(
            *("b", 10),
            **{"cached_tokens": 700, "cached_share_today": 0.4, "ttft_ms_today": 1500.0},
            **{"estimated_ttft_ms": 700.0, "estimated_picks": 5} | first,
        ),
        worker("c", model="another"),
    ]
    (gain,) = gains(workers)
    assert gain == Gain(
        "llama",
        requests=40,
        share_today=pytest.approx(0.5),
        share=pytest.approx(0.85),
        ttft_ms_today=pytest.approx(1200.0),
        ttft_ms=pytest.approx(400.0),
        ttft_error=0.25,
    )
    state = State("r:1")
    state.look(workers, ListQueueResponse(), 0.0)
    text = text_of(state, width=160)
    assert (
        "llama: 50% of prompt tokens come from caches today, 85% would by kvroute;"
        " first token 1,200 ms -> 400 ms (estimated, ± 100); 40 requests" in text
    )
    assert "reused" not in text
    assert re.search("(?m)^a .* 60% +90% ", text)


def test_what_engines_do_not_say_of_today_is_left_out_of_the_line() -> None:
    (gain,) = gains([observed("a", 4, cached_tokens=100)])
    assert gain_text(gain) == (
        "llama: ? of prompt tokens come from caches today, 25% would by kvroute; 4 requests"
    )
    early = observed("a", 4, cached_share_today=0.5, first_tokens_today=2, ttft_ms_today=80.0)
    assert "first token 80 ms; 4 requests" in gain_text(*gains([early]))
    early.observed.estimated_ttft_ms, early.observed.estimated_picks = 40.0, 2
    assert "80 ms -> 40 ms (estimated, ± ?); 4 requests" in gain_text(*gains([early]))
    assert gains([worker("a", model="llama")]) == []


def test_the_gain_takes_lines_from_the_workers_of_a_low_terminal() -> None:
    state = State("r:1")
    state.look([observed(f"w{i}", 1) for i in range(9)], ListQueueResponse(), 0.0)
    lines = text_of(state, height=12, width=160).splitlines()
    assert "and 5 more" in "\n".join(lines)
    assert len(lines) <= 12
    narrow = text_of(state, height=12, width=80).splitlines()  # where the line is two
    assert "and 6 more" in "\n".join(narrow)
