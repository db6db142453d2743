"""Whatever a caller brings, the door says whose call it is, or that it is nobody's."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.net.keys.door import Door
from router.net.keys.issuers import UnknownKeyError
from router.net.keys.key_ring import digest
from router.request.refusal import Reason, Refusal
from tests.stage.keys import a_door, identity

ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.binary().map(
    lambda raw: raw.decode(errors="surrogateescape")
)
"""With lone surrogates, as which HTTP's odd bytes and JSON's escapes arrive."""


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return a_door(tmp_path, identity("a", certificates=["cn:a"]))


def refused(door: Door, token: str | None, names: tuple[str, ...] = ()) -> Reason:
    with pytest.raises(Refusal) as error:
        door.enter(token, lambda: names, is_unix=False)
    return error.value.reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(token=ANY_TEXT, name=ANY_TEXT)
def test_any_other_token_or_name_is_nobodys(door: Door, token: str, name: str) -> None:
    assert refused(door, token, ("cn:a",)) is Reason.UNAUTHENTICATED
    if name != "cn:a":
        assert refused(door, None, (name,)) is Reason.UNAUTHENTICATED
    assert door.faults == 0
    assert door.enter("a-token", tuple, is_unix=False).identity.name == "a"


@given(ANY_TEXT, ANY_TEXT)
def test_every_token_has_a_digest_of_its_own(one: str, other: str) -> None:
    assert (digest(one) == digest(other)) == (one == other)


@pytest.mark.parametrize("fault", [KeyError("k"), RecursionError(), UnicodeError("\udcff")])
def test_a_fault_of_the_door_lets_nobody_in_and_is_counted(
    door: Door, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    def broken(*_: Any) -> Any:
        raise fault

    with pytest.raises(Refusal) as error:
        door.enter(None, broken, is_unix=True)
    assert error.value.reason is Reason.UNAUTHENTICATED
    door._ring.of_token = broken  # type: ignore[method-assign]
    assert refused(door, "a-secret") is Reason.UNAUTHENTICATED
    assert door.faults == 2
    assert [record.exc_info for record in caplog.records] == [None, None]
    assert "a-secret" not in caplog.text


async def test_an_issuer_that_is_no_longer_listed_lets_nobody_in(door: Door) -> None:
    with pytest.raises(Refusal) as error:
        await door.enter_after(UnknownKeyError("https://gone.example"), "a.b.c", tuple)
    assert error.value.reason is Reason.UNAUTHENTICATED
    assert door.faults == 1
