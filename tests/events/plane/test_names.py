"""Names that come from relays reach headers, logs and terminals: none has control characters."""

from typing import Any

import msgspec
import pytest

from events.plane import subjects
from events.plane.facts import Epoch, Heartbeat, Unreadable, decode, encode, encode_heartbeat
from events.plane.settings import EngineSettings, unusable
from indexer.identity import WorkerKey

HOSTILE = ["a\r\nSet-Cookie: b", "a\nb", "\x00", "\x1b[2J", "a\x7f", "\u202eb", "\x85"]
BEAT = Heartbeat(epoch=Epoch(1, 2), address="http://a:1", engine="vllm", sent_at_s=1.0)
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("address", "engine", "engine_version", "model", "role"), str),
    **dict.fromkeys(("kv_connector", "kv_engine_id", "bootstrap_host"), str),
    "priority_scheduling": str,
    "model_aliases": lambda text: ("a", text),
    "lora_names": lambda text: ("a", text),
    "warning_codes": lambda text: (text,),
    "labels": lambda text: {"zone": text},
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_worker_id_is_printable(text: str) -> None:
    assert subjects.worker_of(subjects.facts("f", WorkerKey(text, 0))) is None
    settings = EngineSettings(id=text, engine="vllm", address="http://a:1")
    assert unusable(settings) == "id: has control characters"


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", FIELDS)
def test_a_name_of_a_heartbeat_is_printable(field: str, text: str) -> None:
    beat = msgspec.structs.replace(BEAT, **{field: FIELDS[field](text)})
    read = decode(Heartbeat, encode(beat))
    assert isinstance(read, Unreadable)
    assert read.reason == "malformed"
    assert "control characters" in read.detail
    with pytest.raises(ValueError, match="control characters"):
        encode_heartbeat(beat)


def test_the_key_of_a_label_is_printable() -> None:
    beat = msgspec.structs.replace(BEAT, labels={"a\r\nb": "c"})
    assert isinstance(decode(Heartbeat, encode(beat)), Unreadable)


def test_other_languages_are_names_and_warnings_have_lines() -> None:
    beat = msgspec.structs.replace(
        BEAT, model="模型 ä", labels={"zone": "süd 1"}, warnings=("one\ntwo",)
    )
    assert decode(Heartbeat, encode_heartbeat(beat)) == beat
    key = WorkerKey("wörker 1", 0)
    assert subjects.worker_of(subjects.facts("f", key)) == key
