"""The workers that `kvroute envoy-config` takes from a router."""

import pytest

from router.app.calls.envoy_config import _reached


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://engine:8000", ("engine", 8000)),
        ("http://engine:8000/", ("engine", 8000)),
        ("http://engine", ("engine", 80)),
        ("HTTP://engine:8000", ("engine", 8000)),
        ("http://[::1]:8000", ("::1", 8000)),
        ("10.0.0.1:8000", ("10.0.0.1", 8000)),
    ],
)
def test_every_spelling_of_an_engines_address_is_an_endpoint(
    url: str, place: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _reached([url, "", url]) == [place]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        "https://engine:8443",
        "http://user:secret@engine:8000",
        "http://engine/a",
        "http://engine:x",
        "http://[engine",
        "http://",
    ],
)
def test_an_engine_that_the_cluster_can_t_reach_is_left_out_alone_and_named(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _reached(["http://other:1", url]) == [("other", 1)]
    err = capsys.readouterr().err
    assert err.startswith("kvroute: warning: worker ")
    assert "secret" not in err
