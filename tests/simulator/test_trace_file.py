"""Reading trace files: the three forms, and what a bad line gets."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.trace import TraceRequest
from simulator.trace_file import SLICES, TraceError, load_trace, read_trace


def line(timestamp: float, input_length: int, hash_ids: list[int], **others: Any) -> str:
    known = {"timestamp": timestamp, "input_length": input_length, "output_length": 5}
    return json.dumps(known | {"hash_ids": hash_ids} | others)


def read(*lines: str) -> list[TraceRequest]:
    return list(read_trace(lines))


def ids(request: TraceRequest) -> list[int]:
    return request.hash_ids.tolist()


def test_mooncakes_lines_are_read_and_blank_ones_skipped() -> None:
    one, other = read("\n", line(0, 600, [7, 8]), "  \n", line(1500, 3, [9]))
    assert (one.arrival_s, one.prompt_tokens, one.output_tokens, ids(one)) == (0, 600, 5, [7, 8])
    assert (other.arrival_s, ids(other)) == (1.5, [9])
    assert (one.session_id, one.think_s) == (None, None)
    assert read() == []


def test_other_fields_are_ignored_and_an_answer_has_at_least_one_token() -> None:
    [request] = read(line(0, 3, [1], output_length=0, api_ms=4, colour="green"))
    assert request.output_tokens == 1


def test_a_turn_thinks_after_the_one_before_it_and_a_sessions_first_waits_for_nobody() -> None:
    first, other, second = read(
        line(0, 3, [1], session_id="a", turn=4, think_ms=50),
        line(5, 3, [2], session_id=17),
        line(9, 3, [3], session_id="a", turn=5, think_ms=2500),
    )
    assert (first.session_id, first.turn, first.think_s) == ("a", 4, None)
    assert (other.session_id, other.think_s) == ("17", None)
    assert (second.turn, second.think_s) == (5, 2.5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: "),
        (line(0, 0, []), "line 2: .*input_length"),
        (line(0, 513, [1]), "line 2: input_length 513 needs 2 hash_ids of 512 tokens"),
        (line(0, 10, [-1]), "line 2: .*hash_ids"),
        (line(0, 10, [1 << 64]), "line 2: .*(64 bits|hash_ids)"),
        (line(-5, 10, [1]), "line 2: .*timestamp"),
        (line(0, 10, [1], think_ms=-1), "line 2: .*think_ms"),
        ('{"timestamp": 0, "input_length": 3, "hash_ids": [1]}', "line 2: .*output_length"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(line(0, 10, [1]), bad)


def test_hash_ids_may_be_any_64_bits() -> None:
    [request] = read(line(0, 10, [(1 << 64) - 1]))
    assert ids(request) == [(1 << 64) - 1]


def test_time_and_turns_that_go_back_are_bad_lines() -> None:
    with pytest.raises(TraceError, match=r"line 2: its time, 0.001 s, is before the last one's"):
        read(line(2, 10, [1]), line(1, 10, [1]))
    with pytest.raises(TraceError, match="line 2: turn 1 of session 's' comes after its turn 2"):
        read(
            line(1, 10, [1], session_id="s", turn=2, think_ms=0),
            line(2, 10, [1], session_id="s", turn=1, think_ms=0),
        )


def test_csv_prompts_share_nothing() -> None:
    one, other = read("arrival_s,input_length,output_length\n", "0.5,1000,0\n", "\n", "2,512,7\n")
    assert (one.arrival_s, one.prompt_tokens, one.output_tokens) == (0.5, 1000, 1)
    assert (other.arrival_s, other.output_tokens) == (2.0, 7)
    assert len(ids(one)) == 2
    assert not set(ids(one)) & set(ids(other))


def test_csv_may_tell_milliseconds_in_any_column_order() -> None:
    [request] = read("output_length, timestamp_ms ,model,input_length\n", "3, 1500 ,llama,40\n")
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (1.5, 40, 3)


def test_a_csv_sessions_prompt_begins_with_the_one_before_it() -> None:
    one, alone, two, back = read(
        "arrival_s,input_length,output_length,session_id,turn,think_ms\n",
        "0,1000,5,s,0,\n",
        "1,1000,5,,,\n",
        "2,2000,5,s,1,250\n",
        "3,600,5,s,2,250\n",
    )
    assert ids(two)[:2] == ids(one)
    assert ids(back) == ids(one)
    assert not set(ids(alone)) & set(ids(two))
    assert [request.think_s for request in (one, alone, two)] == [None, None, 0.25]


def test_a_csv_prefix_is_shared_in_whole_ids_and_no_further() -> None:
    one, two, three, session = read(
        "arrival_s,input_length,output_length,prefix_id,prefix_tokens,session_id\n",
        "0,2000,5,system,1100,\n",
        "0,2000,5,system,1600,\n",
        "0,700,5,system,1600,\n",
        "0,3000,5,system,1100,s\n",
    )
    assert ids(two)[:2] == ids(one)[:2]
    assert ids(two)[2:] != ids(one)[2:]
    assert ids(three)[:1] == ids(one)[:1]
    assert ids(three)[1] not in ids(one) + ids(two)
    assert ids(session)[:2] == ids(one)[:2]
    assert not set(ids(session)[2:]) & set(ids(one) + ids(two))


HEADER = "arrival_s,input_length,output_length\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["arrival_s,tokens\n"], "line 1: .*input_length, output_length: 'arrival_s,tokens'"),
        (["input_length,output_length\n"], "line 1: .*arrival_s"),
        (["\n", "hello\n"], "line 2: neither JSON nor a CSV header"),
        ([HEADER, "0,5\n"], "line 2: 2 cells, but the header has 3"),
        ([HEADER, "0,5,5\n", "0,many,5\n"], "line 3: .*input_length"),
        ([HEADER, "0,0,5\n"], "line 2: .*input_length"),
        ([HEADER, "0,900000000000,5\n"], "line 2: .*input_length"),
        ([HEADER, ",5,5\n"], "line 2: neither arrival_s nor timestamp_ms"),
        ([HEADER, "nan,5,5\n"], "line 2: .*arrival_s"),
        ([HEADER, "inf,5,5\n"], "line 2: .*arrival_s"),
        ([HEADER, "0,5,5\n", '0,"5,5\n'], "line 3: "),
        ([HEADER, "9,5,5\n", "1,5,5\n"], "line 3: its time"),
    ],
)
def test_a_bad_csv_row_is_named_by_its_number(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(*lines)


@given(
    st.lists(
        st.one_of(
            st.text(),
            st.text('0123456789.,"-e\n', max_size=12),
            st.sampled_from([HEADER, line(0, 600, [1, 2], session_id="s", turn=1, think_ms=2)]),
        ),
        max_size=6,
    )
)
def test_whatever_a_file_holds_it_is_read_or_a_line_is_named(lines: list[str]) -> None:
    complaint = None
    try:
        read(*lines)
    except TraceError as error:
        complaint = str(error)
    assert complaint is None or complaint.startswith("line ")


@pytest.mark.parametrize("name", SLICES)
def test_a_line_that_is_cut_short_is_a_bad_one(name: str) -> None:
    text = SLICES[name].read_text().splitlines()[0]
    for end in range(1, len(text)):
        with pytest.raises(TraceError, match="line 1: "):
            read(text[:end])


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path: Path) -> None:
    file = tmp_path / "sheet.csv"
    file.write_text(HEADER + "0,5,5\n", encoding="utf-8-sig")
    assert len(load_trace(file).requests) == 1


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("{}\n")
    with pytest.raises(TraceError, match=r"t\.jsonl: line 1: "):
        load_trace(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(TraceError, match=r"t\.jsonl: is no text"):
        load_trace(file)
    with pytest.raises(TraceError, match=r"nowhere: No such file.*conversation"):
        load_trace("nowhere")
    file.write_text(line(0, 3, [1]))
    assert load_trace(file).name == "t"
