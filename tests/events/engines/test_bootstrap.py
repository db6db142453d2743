"""Where a prefill engine is found: hosts and URLs."""

import pytest

from events.engines.bootstrap import bootstrap_url, host_of


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://10.0.0.7:8000/v1", "10.0.0.7"),
        ("node-7:8000", "node-7"),
        ("http://[::1]:8000", "::1"),
        ("grpc://n:1", "n"),
        ("", ""),
        ("http://[no", ""),
    ],
)
def test_a_host_is_read_out_of_any_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_url_has_the_default_port_and_brackets_where_they_belong() -> None:
    assert bootstrap_url("node-7", 0) == "http://node-7:8998"
    assert bootstrap_url("::1", 9001) == "http://[::1]:9001"
