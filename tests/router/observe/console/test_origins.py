"""Hosts and origins that a browser may name."""

import pytest

from router.observe.console.origins import host_fits, host_of, origin_fits


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost:9464", "localhost"),
        ("LocalHost", "localhost"),
        ("[::1]:9464", "::1"),
        ("[::1]", "::1"),
        ("127.0.0.1:70000", ""),
        ("evil:port", ""),
        ("[::1", ""),
        ("[::1]x", ""),
        ("", ""),
    ],
)
def test_the_host_of_a_header(header: str, host: str) -> None:
    assert host_of(header) == host


def test_without_keys_only_names_of_loopback_fit() -> None:
    for header in ("localhost:1", "127.0.0.1:1", "127.9.9.9", "[::1]:1"):
        assert host_fits(header, (), guarded=False)
    for header in ("rebound.example:9464", "10.0.0.1", "localhost.evil.example", ""):
        assert not host_fits(header, (), guarded=False)
    assert host_fits("console.example", {"console.example"}, guarded=False)


def test_with_keys_any_name_fits_unless_names_are_listed() -> None:
    assert host_fits("router.example:9464", (), guarded=True)
    assert not host_fits("router.example", {"console.example"}, guarded=True)
    assert host_fits("localhost", {"console.example"}, guarded=True)


@pytest.mark.parametrize(
    ("headers", "needed", "fits"),
    [
        ({"Host": "a:1", "Origin": "http://a:1"}, True, True),
        ({"Host": "a:1", "Origin": "https://a:1"}, True, True),
        ({"Host": "a:1", "Origin": "http://b:1"}, False, False),
        ({"Host": "a:1", "Origin": "http://a:2"}, False, False),
        ({"Host": "a:1", "Origin": "null"}, False, False),
        ({"Host": "a:1"}, True, False),
        ({"Host": "a:1"}, False, True),
        ({"Host": "a:1", "Sec-Fetch-Site": "cross-site"}, False, False),
        ({"Host": "a:1", "Sec-Fetch-Site": "same-site"}, False, False),
        ({"Host": "a:1", "Sec-Fetch-Site": "none"}, False, True),
    ],
)
def test_origins(headers: dict[str, str], needed: bool, fits: bool) -> None:
    assert origin_fits(headers, "http", needed=needed) is fits
