"""Which pages may read answers, whatever they and the engines write in their headers."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from router.config.keys import ConfigError
from router.config.reading import load
from router.config.settings.configurations import GatewayConfig
from router.gateway.server.cors import ENGINES, REQUESTED_MAX, Cors

ORIGIN = "https://chat.example"
TEXT = st.text(max_size=60) | st.sampled_from([ORIGIN, "null", "*", "\udcff"])
NAMES = st.sampled_from(
    ["Origin", "Access-Control-Request-Headers", "Access-Control-Request-Method", "Vary"]
)


def answered(cors: Cors, methods: str = "", **headers: str) -> CIMultiDict[str]:
    """The headers of an answer. headers: of the request, with _ for -."""
    answer: CIMultiDict[str] = CIMultiDict()
    request = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    cors.apply(request, answer, methods=methods)
    return answer


@given(st.lists(st.tuples(NAMES, TEXT), max_size=6), st.booleans(), st.booleans())
def test_only_listed_origins_read_and_nothing_of_a_request_comes_back_unchecked(
    headers: list[tuple[str, str]], is_preflight: bool, is_any: bool
) -> None:
    answer = CIMultiDict([("access-control-allow-origin", "x"), *((name, "y") for name in ENGINES)])
    request = CIMultiDict(headers)
    cors = Cors(("*",) if is_any else (ORIGIN,))
    cors.apply(request, answer, methods="POST, OPTIONS" if is_preflight else "")
    allowed = answer.getall("Access-Control-Allow-Origin", [])
    if is_any:
        assert allowed == (["*"] if "Origin" in request else [])
    else:
        assert allowed == ([ORIGIN] if request.get("Origin") == ORIGIN else [])
        assert "Origin" in answer["Vary"]
    assert "y" not in answer.values()
    assert "Access-Control-Allow-Credentials" not in answer
    for value in answer.values():
        assert re.fullmatch(r"[\x20-\x7e]*", value)
        assert len(value) <= REQUESTED_MAX


@given(st.text(string.ascii_letters + "-, ", min_size=1, max_size=200))
def test_a_preflight_is_answered_with_the_headers_that_it_names(names: str) -> None:
    answer = answered(Cors(("*",)), "GET", Origin="https://x", Access_Control_Request_Headers=names)
    assert answer["Access-Control-Allow-Headers"] == names
    assert answer["Access-Control-Allow-Methods"] == "GET"


def test_without_origins_no_page_reads_anything() -> None:
    assert not answered(Cors(()), "GET", Origin=ORIGIN)


@pytest.mark.parametrize("origin", ["chat.example", "https://a/b", "https://*.example", "null", ""])
def test_what_is_no_origin_stops_the_start_and_is_named(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.cors_origins"):
        load(GatewayConfig, None, {}, {("gateway", "cors_origins"): [ORIGIN, origin]})
