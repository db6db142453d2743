"""Reading trace files: columns by their names, and what a bad line gets."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.traffic.trace import Trace, TraceRequest
from simulator.traffic.trace_columns import UNREAD_MAX, TraceError
from simulator.traffic.trace_file import NAMES_MAX, SLICES, load_trace, read_trace

FORMS = Path(__file__).parent / "data" / "traces"


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
        ('{"a": ' + "[" * 100_000, "line 2: not JSON: "),
        (line(0, 0, []), "line 2, column input_length: '0': expected int >= 1"),
        (line(0, 513, [1]), "line 2, column hash_ids: a prompt of 513 tokens needs 2 ids of 512"),
        (line(0, 33, [1, 2, 3]), "but there are 3; --trace-block-size 16 would fit"),
        (line(0, 10, [-1]), r"line 2, column hash_ids at \[0\]: expected int >= 0"),
        (line(0, 10, [1 << 64]), "line 2, column hash_ids: an id has more than 64 bits"),
        (line(-5, 10, [1]), "line 2, column timestamp: '-5': expected float >= 0"),
        (line(0, 10, [1], think_ms=-1), "line 2, column think_ms: '-1': "),
        (line(0, 10, [1], priority=1.5), "line 2, column priority: '1.5': expected int"),
        (line(0, 10, [1], priority=1 << 31), "line 2, column priority: '2147483648': "),
        (line(0, 10, [1], tenant="a" * 1025), "line 2, column tenant: 'a+': .* length <= 1024"),
        (line(0, 10, [1], model=["a"]), r"line 2, column model: .*: expected str, got array"),
        (
            '{"timestamp": 0, "input_length": 3, "hash_ids": [1]}',
            "line 2, column output_length: is",
        ),
        ('{"timestamp": 0, "input_length": 3, "output_length": 4}', "line 2, column hash_ids: is"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(line(0, 10, [1]), bad)


def test_hash_ids_may_be_any_64_bits() -> None:
    [request] = read(line(0, 10, [(1 << 64) - 1]))
    assert ids(request) == [(1 << 64) - 1]


def test_time_and_turns_that_go_back_are_bad_lines() -> None:
    with pytest.raises(TraceError, match=r"line 2, column timestamp: 0.001 s is before the"):
        read(line(2, 10, [1]), line(1, 10, [1]))
    with pytest.raises(
        TraceError, match="line 2, column turn: turn 1 of session 's' comes after its turn 2"
    ):
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


def test_a_think_time_without_a_session_is_none() -> None:
    [alone] = read("arrival_s,input_length,output_length,think_ms\n", "1,1000,5,250\n")
    assert alone.think_s is None


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


def form(name: str, id_tokens: int = 512) -> Trace:
    return load_trace(FORMS / name, id_tokens)


def uses(trace: Trace) -> dict[str, str]:
    """Name of a column that is read -> its meaning, up to the first punctuation mark."""
    return {
        use.name: use.meaning.split(",")[0].split(";")[0] for use in trace.columns if use.is_read
    }


def unread(trace: Trace) -> list[str]:
    return [use.name for use in trace.columns if not use.is_read]


@pytest.mark.parametrize(
    ("name", "columns", "left_out"),
    [
        ("azure_2023.csv", "TIMESTAMP ContextTokens GeneratedTokens", []),
        ("azure_2024.csv", "TIMESTAMP ContextTokens GeneratedTokens", []),
        ("azure_multimodal.csv", "TIMESTAMP ContextTokens GeneratedTokens", ["NumImages"]),
        ("azure_processed.csv", "arrived_at num_prefill_tokens num_decode_tokens", []),
        ("burstgpt.csv", "Timestamp|Model|Request tokens|Response tokens", ["Total tokens"]),
        ("burstgpt_sessions.csv", "Timestamp|Session ID|Model|Request tokens", ["Elapsed time"]),
        ("all_columns.csv", "arrival_s input_length output_length", ["colour"]),
    ],
)
def test_a_public_form_is_known_by_its_columns(
    name: str, columns: str, left_out: list[str]
) -> None:
    trace = form(name)
    read = list(uses(trace))
    for column in columns.split("|" if "|" in columns else None):
        assert column in read
    for column in left_out:
        assert column in unread(trace)
    assert uses(trace)[read[0]] in ("arrival", "arrival in seconds or as date and time")
    first, second, third = trace.requests
    seconds = 2.0 if name == "all_columns.csv" else 60.0
    assert first.arrival_s == 0.0
    assert third.arrival_s == pytest.approx(seconds)
    assert [one.prompt_tokens for one in trace.requests] == [1200, 90, 5000]
    assert [one.output_tokens for one in trace.requests] == [30, 120, 8]
    assert not set(ids(second)) & set(ids(first) + ids(third))


def test_what_a_column_was_taken_for_is_said_with_its_unit() -> None:
    assert [tuple(use) for use in form("burstgpt_sessions.csv").columns[:2]] == [
        ("Timestamp", "arrival, in seconds or as date and time, counted from the first row", True),
        ("Session ID", "session; without hash_ids its prompts begin alike", True),
    ]
    assert uses(form("mooncake.jsonl")) == {
        "timestamp": "arrival",
        "input_length": "prompt tokens",
        "output_length": "output tokens",
        "hash_ids": "text of the prompt",
    }
    assert form("mooncake.jsonl").columns[0].meaning == "arrival, in milliseconds"
    assert unread(form("mooncake.jsonl")) == []
    assert unread(form("azure_2023.csv")) == ["hash_ids"]  # which it doesn't have


def test_a_second_column_for_the_same_is_left_unread_and_named(tmp_path: Path) -> None:
    file = tmp_path / "twice.csv"
    file.write_text("timestamp_ms,arrival_s,input_length,output_length\n1500,7,5,5\n")
    trace = load_trace(file)
    assert trace.requests[0].arrival_s == 1.5
    assert trace.columns[3][:2] == ("arrival_s", "not read: 'timestamp_ms' has the same")


def test_all_that_a_request_carries_is_read() -> None:
    first, plain, third = form("all_columns.csv").requests
    assert (first.priority, first.tenant, first.model, first.lora_name) == (-2, "red", "chat", None)
    assert (first.deadline_s, first.session_id, first.think_s) == (2.5, "s", None)
    assert (third.priority, third.tenant, third.lora_name, third.turn) == (5, "blue", "poems", 1)
    assert (third.deadline_s, third.think_s) == (None, 0.25)
    assert (plain.priority, plain.tenant, plain.model, plain.deadline_s) == (None,) * 4
    more = {"tenant": 7, "model": "m", "lora": "l", "deadline_s": 3, "ttft_slo_ms": 500}
    one, two = read(line(0, 3, [1], **more), line(1, 3, [1]))
    assert (one.tenant, one.model, one.lora_name, one.deadline_s) == ("7", "m", "l", 3.0)
    assert (one.ttft_slo_s, two.ttft_slo_s) == (0.5, None)
    assert (two.tenant, two.model) == (None, None)


def test_prompts_of_different_models_or_loras_share_nothing() -> None:
    def named(**names: str) -> list[int]:
        [request] = read(line(0, 600, [1, 2], **names))
        return ids(request)

    several = [named(), named(model="a"), named(lora_name="a"), named(model="a", lora_name="a")]
    assert len({one for both in several for one in both}) == 8
    assert named(model="a", lora_name="b") == named(Model="a", lora="b")


def test_bailians_chats_go_on_one_another_in_seconds_and_ids_of_16_tokens() -> None:
    trace = form("bailian.jsonl", 16)
    assert [one.arrival_s for one in trace.requests] == [0.5, 2.25, 4.0, 5.0, 6.0]
    assert [one.session_id for one in trace.requests] == ["7", "7", "7", "7", "11"]
    assert trace.columns[2].meaning == "arrival, in seconds"
    assert unread(trace) == ["type", "turn"]
    _, two, three, branch, _ = trace.requests
    assert len(three.block_hashes(64)) == 1
    assert two.block_hashes(64).tolist() == three.block_hashes(64).tolist()
    assert branch.block_hashes(32)[0] == two.block_hashes(32)[0]
    with pytest.raises(
        TraceError, match=r"line 1, column hash_ids: .* --trace-block-size 16 would"
    ):
        form("bailian.jsonl")


def test_sessions_and_prefixes_share_whole_ids_of_the_size_that_is_given() -> None:
    text = ["arrival_s,input_length,output_length,prefix_id,prefix_tokens\n"]
    text += [f"{i},200,5,system,100\n" for i in range(2)]
    one, two = read_trace(text, 16)
    assert (one.id_tokens, len(ids(one))) == (16, 13)
    assert [a == b for a, b in zip(ids(one), ids(two), strict=True)] == [True] * 6 + [False] * 7
    one, two = read_trace(text)
    assert not set(ids(one)) & set(ids(two))


def test_models_and_loras_are_bounded() -> None:
    for column in ("model", "lora_name"):
        lines = [line(i, 3, [1], **{column: f"m{i}"}) for i in range(NAMES_MAX)]
        assert len(read(*lines, line(NAMES_MAX, 3, [1], **{column: "m0"}))) == NAMES_MAX + 1
        with pytest.raises(TraceError, match=f"{column}: 'more' is one too many: 256 different"):
            read(*lines, line(NAMES_MAX, 3, [1], **{column: "more"}))


def test_names_of_unread_columns_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    for names in (UNREAD_MAX, UNREAD_MAX + 1):
        file.write_text("".join(line(0, 3, [1], **{f"x{i}": 0}) + "\n" for i in range(names)))
        columns = load_trace(file).columns
        assert len(columns) == 4 + names
        assert (columns[-1].name == "...") == (names > UNREAD_MAX)


HEADER = "arrival_s,input_length,output_length\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["arrival_s,tokens\n"], r"line 1: .*input_length \(or .* and output_length .*,tokens'"),
        (["input_length,output_length\n"], r"line 1: .*a column arrival_s \(or arrived_at, "),
        (["\n", "hello\n"], "line 2: expected JSON, or a CSV header"),
        (
            ["arrival_s,input_length,output_length,a,a\n"],
            "line 1: the header has 'a' more than once",
        ),
        ([HEADER, "0,5\n"], "line 2: 2 cells, but the header has 3"),
        ([HEADER, "0,5,5\n", "0,many,5\n"], "line 3, column input_length: 'many': expected int"),
        ([HEADER, "0,0,5\n"], "line 2, column input_length: '0': expected int >= 1"),
        ([HEADER, "0,900000000000,5\n"], "line 2, column input_length: '900000000000': "),
        ([HEADER, ",5,5\n"], "line 2, column arrival_s: is empty or missing"),
        ([HEADER, "nan,5,5\n"], "line 2, column arrival_s: 'nan': "),
        ([HEADER, "inf,5,5\n"], "line 2, column arrival_s: 'inf': "),
        (
            [AZURE, "noon,5,5\n"],
            "line 2, column TIMESTAMP: 'noon': expected seconds, or a date and",
        ),
        ([AZURE, "nan,5,5\n"], "line 2, column TIMESTAMP: 'nan': "),
        ([AZURE, "2023-11-16 18:17:03,5\n"], "line 2: 2 cells"),
        ([AZURE, "2023-11-16,5,5\n", "2023-11-15,5,5\n"], "line 3, column TIMESTAMP: -86400 s is"),
        ([HEADER, "0,5,5\n", '0,"5,5\n'], "line 3: "),
        (
            [HEADER, "9,5,5\n", "1,5,5\n"],
            "line 3, column arrival_s: 1 s is before the last request, 9 s",
        ),
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
            st.sampled_from([AZURE, "0001-01-01T00:00+23:59,1,1", line(0, 600, [1, 2], chat_id=1)]),
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
    with pytest.raises(TraceError, match=r"t\.jsonl: line 1, column arrival_s "):
        load_trace(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(TraceError, match=r"t\.jsonl: is not text"):
        load_trace(file)
    with pytest.raises(TraceError, match=r"nowhere: No such file.*conversation"):
        load_trace("nowhere")
    file.write_text(line(0, 3, [1]))
    assert load_trace(file).name == "t"
