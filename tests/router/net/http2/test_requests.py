"""Header fields as requests: well-formed ones are taken, and one change makes them malformed."""

import base64
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.net.http2.requests import Head, trailers_fault

PSEUDO = [(":method", "POST"), (":scheme", "http"), (":path", "/a/B")]
NAMES = st.text(string.ascii_lowercase + string.digits + "-_.", min_size=1, max_size=9)
REGULAR = st.tuples(
    NAMES.filter(
        lambda name: name not in ("te", "connection", "upgrade") and not name.endswith("-bin")
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=9),
)
Fields = tuple[list[tuple[str, str]], list[tuple[str, str]]]
FIELDS = st.tuples(st.permutations(PSEUDO), st.lists(REGULAR, max_size=6))


@given(FIELDS)
def test_what_is_well_formed_is_taken(fields: Fields) -> None:
    pseudo, regular = fields
    head = Head([*pseudo, *regular])
    assert head.fault == ""
    assert head.path == "/a/B"
    assert list(head.metadata or ()) == regular
    assert trailers_fault(regular) == ""


BAD_FIELDS = st.one_of(
    st.tuples(NAMES.map(str.upper).filter(str.isupper), st.just("a")),
    st.tuples(
        st.text(min_size=1, max_size=4).filter(lambda name: not name.isascii() or " " in name),
        st.just("a"),
    ),
    st.tuples(NAMES, st.sampled_from(("a\0", "\ra", "a\nb", "a\r\nb: c"))),
    st.sampled_from(
        (
            ("connection", "close"), ("keep-alive", "1"), ("proxy-connection", "a"),
            ("transfer-encoding", "chunked"), ("upgrade", "h2c"), ("te", "gzip"), ("", "a"),
            (":status", "200"), (":evil", "a"), (":authority", "a"), (":path", "/"), (":", "a"),
        )
    ),
)  # fmt: skip


@given(FIELDS, BAD_FIELDS, st.integers(0, 6))
def test_one_bad_field_makes_it_malformed(fields: Fields, bad: tuple[str, str], place: int) -> None:
    pseudo, regular = fields
    regular = [("x", "y"), *regular[:place], bad, *regular[place:]]
    assert Head([*pseudo, *regular]).fault
    assert trailers_fault(regular)


@given(st.permutations(PSEUDO), st.sampled_from(PSEUDO), st.sampled_from(("without", "twice")))
def test_pseudo_headers_come_once(
    pseudo: list[tuple[str, str]], one: tuple[str, str], how: str
) -> None:
    fields = [field for field in pseudo if field != one] if how == "without" else [*pseudo, one]
    assert Head(fields).fault


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "post", "CONNECT", ""])
def test_a_method_is_post(method: str) -> None:
    assert Head([(":method", method), *PSEUDO[1:]]).fault


@pytest.mark.parametrize("path", ["", "*", "a/B", "http://a/b"])
def test_a_path_begins_with_a_slash(path: str) -> None:
    assert Head([*PSEUDO[:2], (":path", path)]).fault


@pytest.mark.parametrize(
    ("values", "length"),
    [(["12"], 12), (["0"], 0), (["12", "12"], 12), (["12", "13"], None), (["x"], None),
     (["-1"], None), (["+1"], None), (["1 2"], None), ([""], None), (["٣"], None),
     (["9" * 30], None)],
)  # fmt: skip
def test_a_content_length_is_one_number(values: list[str], length: int | None) -> None:
    head = Head([*PSEUDO, *(("content-length", value) for value in values)])
    assert bool(head.fault) == (length is None)
    if length is not None:
        assert head.content_length == length


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=5), st.data())
def test_bin_values_are_split_at_commas_and_decoded(
    values: list[bytes], drawn: st.DataObject
) -> None:
    """Padded or not, in one field or in several."""
    texts = []
    for value in values:
        text = base64.b64encode(value).decode()
        texts.append(text if drawn.draw(st.booleans()) else text.rstrip("="))
    cut = drawn.draw(st.integers(0, len(texts)))
    fields = [("x-bin", ",".join(part)) for part in (texts[:cut], texts[cut:]) if part]
    assert Head([*PSEUDO, *fields]).metadata == tuple(("x-bin", value) for value in values)


@given(st.text(string.printable, min_size=1, max_size=9))
def test_a_bin_value_is_base64_or_none(text: str) -> None:
    head = Head([*PSEUDO, ("x-bin", text)])
    alphabet = set(string.ascii_letters + string.digits + "+/=, \t")
    if not set(text) <= alphabet:
        assert head.metadata is None
