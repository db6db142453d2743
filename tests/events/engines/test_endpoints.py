"""Endpoints that can't be used are known beforehand, and passwords are never shown."""

import re

import aiohttp
import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from events.engines.endpoints import http_error, is_ipv6, masked, rank_endpoint, zmq_error
from events.plane.settings import EngineSettings, shared_socket, unusable

LONG_LABEL = "a" * 64
LONG_NAME = ".".join(["a" * 60] * 5)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://host:5557",
        "tcp://10.0.0.1:65535",
        "tcp://[::1]:5557",
        "tcp://[fe80::1%eth0]:5557",
        "tcp://engine-0.engines.default.svc.cluster.local.:5557",
        "tcp://engine_0:5557",
        "tcp://xn--bcher-kva.example:5557",
        "ipc:///tmp/events",
        "ipc://@abstract",
    ],
)
def test_a_usable_zmq_endpoint_has_no_error(endpoint: str) -> None:
    assert zmq_error(endpoint) == ""


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("", "no ZMQ endpoint"),
        ("nonsense", "no ZMQ endpoint"),
        ("http://host:1", "no ZMQ endpoint"),
        ("inproc://x", "no ZMQ endpoint"),
        ("TCP://host:1", "no ZMQ endpoint"),
        ("tcp://host", "no port"),
        ("tcp://host:", "no port"),
        ("tcp://host:0", "no port"),
        ("tcp://host:*", "no port"),
        ("tcp://host:65536", "no port"),
        ("tcp://host:" + "9" * 5000, "no port"),
        ("tcp://host:\uff15\uff15", "no port"),
        ("tcp://host:5557/x", "no port"),
        ("tcp://:5557", "the host"),
        ("tcp://a..b:5557", "the host"),
        (f"tcp://{LONG_LABEL}:5557", "the host"),
        (f"tcp://{LONG_NAME}:5557", "the host"),
        ("tcp://user:pw@host:5557", "in brackets"),
        ("tcp://::1:5557", "in brackets"),
        ("tcp://[::zz]:5557", "no IPv6 address"),
        ("tcp://10.0.0.256:5557", "no IPv4 address"),
        ("tcp://10.0.0.2:0;10.0.0.1:5557", "source address"),
        ("tcp://ho st:5557", "the character ' '"),
        ("tcp://host\n:5557", r"the character '\n'"),
        ("tcp://host\0:5557", r"the character '\x00'"),
        ("tcp://*:5557", "name the engine's host"),
        ("tcp://bücher.example:5557", "Punycode"),
        ("tcp://\ud800:5557", "Punycode"),
        ("ipc://", "no path"),
        ("ipc:///" + "a" * 107, "107 bytes"),
    ],
)
def test_a_zmq_endpoint_that_can_never_be_used_says_why(endpoint: str, why: str) -> None:
    assert why in zmq_error(endpoint)


def test_a_star_is_a_host_only_where_the_endpoint_is_bound() -> None:
    assert zmq_error("tcp://*:5557", bind=True) == ""
    assert zmq_error("tcp://*:*", bind=True)


def test_every_rank_needs_a_port_of_its_own() -> None:
    assert zmq_error("tcp://host:65532", ranks=4) == ""
    assert "65536" in zmq_error("tcp://host:65533", ranks=4)
    assert "only tcp endpoints" in zmq_error("ipc:///tmp/events", ranks=2)


@pytest.mark.parametrize(
    "base",
    [
        "http://host",
        "https://host:8000/prefix/",
        "http://[fd00::12]:8000",
        "http://user:pw@host:8000",
        "HTTP://10.0.0.1:1",
        "http://xn--bcher-kva.example",
    ],
)
def test_a_usable_http_base_has_no_error(base: str) -> None:
    assert http_error(base) == ""


@pytest.mark.parametrize(
    "base",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http:///x",
        "http://a..b",
        "http://.a",
        f"http://{LONG_LABEL}",
        f"http://{LONG_LABEL}.example",
        f"http://{LONG_NAME}",
        "http://host:0",
        "http://host:99999",
        "http://host:abc",
        "http://[::1",
        "http://[zz]:1",
        "http://999.1.1.1",
        "http://1",
        "http://a b",
        "http://host/\x00",
        "http://host\r\nX: y",
        "http://a%00b",
        "http://host?x=1",
        "http://host#x",
        "http://bücher.example",
        "http://\ud800",
    ],
)
def test_an_http_base_that_can_never_be_used_says_why(base: str) -> None:
    assert http_error(base)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:65535", "ipc://@kvroute"]
)
def test_zmq_connects_to_a_usable_endpoint(endpoint: str) -> None:
    assert zmq_error(endpoint) == ""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))
        socket.connect(endpoint)


@given(st.text(max_size=200))
def test_any_text_has_a_bounded_sentence_or_none(text: str) -> None:
    for error in (zmq_error(text), http_error(text), zmq_error(f"tcp://{text}")):
        assert len(error) < 1024
        assert not error or error.isprintable()


HOSTS = st.text(max_size=20) | st.from_regex(r"[A-Za-z0-9._\[\]:;%*@-]{1,70}", fullmatch=True)
PORTS = st.integers(0, 70_000)


@given(st.text(max_size=80) | st.builds("http://{}:{}".format, HOSTS, PORTS))
def test_an_http_base_without_an_error_is_a_url_to_aiohttp(base: str) -> None:
    if http_error(base):
        return
    url = aiohttp.client.URL(base + "/metrics")
    assert url.host
    url.host.encode("idna")


def test_user_names_and_passwords_are_masked() -> None:
    assert masked("http://user:secret@host:1/x") == "http://***@host:1/x"
    assert masked("no answer of https://:p%40ss@h: 404") == "no answer of https://***@h: 404"
    assert masked("http://u:p/s@e@cret@host") == "http://***@host"
    assert masked("http://host:1/x y@z") == "http://host:1/x y@z"
    for error in (
        http_error("http://user:secret@host:99999"),
        http_error("http://user:secret@a..b"),
        http_error("http://user:sec/ret@host"),
        zmq_error("tcp://user:secret@host"),
    ):
        assert "secret" not in error
        assert "sec/ret" not in error
        assert "'sec'" not in error
        assert error


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"events": "nonsense"}, "events"),
        ({"events": "tcp://host"}, "events"),
        ({"events": "tcp://*:5557"}, "events"),
        ({"events": "tcp://host:5557", "replay": "bad"}, "replay"),
        ({"events": "tcp://host:65535", "ranks": 2}, "events"),
        ({"engine": "sglang", "load": "bad"}, "load"),
        ({"engine": "vllm", "load": "tcp://host:1"}, "load"),
        ({"metrics": "nonsense"}, "metrics"),
        ({"metrics": f"http://{LONG_LABEL}"}, "metrics"),
        ({"address": "http://a..b"}, "address"),
        ({"address": "host:1"}, "address"),
        ({"address": "engine", "metrics": "http://host:1"}, "address"),
        ({"address": "grpc://host:1"}, "address"),
        ({"kv_connector": "MooncakeConnector", "bootstrap_host": "a..b"}, "bootstrap_host"),
    ],
)
def test_settings_that_can_never_work_name_the_key(fields: dict[str, object], key: str) -> None:
    settings = EngineSettings(**{"id": "w", "engine": "vllm", "address": "http://host:1", **fields})  # type: ignore[arg-type]
    assert unusable(settings).startswith(f"{key}: ")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"events": "tcp://*:5557", "events_bind": True},
        {"address": "grpc://host:1", "metrics": "http://host:1"},
        {"metrics": "http://host:1", "events": "tcp://host:5557", "ranks": 4},
        {"kv_connector": "MooncakeConnector", "address": "http://[::1]:8000"},
    ],
)
def test_settings_that_can_work_have_no_error(fields: dict[str, object]) -> None:
    settings = EngineSettings(**{"id": "w", "engine": "vllm", "address": "http://host:1", **fields})  # type: ignore[arg-type]
    assert unusable(settings) == ""


@pytest.mark.parametrize(
    ("endpoint", "rank", "answer"),
    [
        ("tcp://host:5557", 0, "tcp://host:5557"),
        ("tcp://host:5557", 3, "tcp://host:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
    ],
)
def test_a_rank_has_the_port_of_its_number(endpoint: str, rank: int, answer: str) -> None:
    assert rank_endpoint(endpoint, rank) == answer


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/events", "tcp://host", "tcp://host:*", "inproc://x"]
)
def test_an_endpoint_without_a_port_has_one_rank(endpoint: str) -> None:
    with pytest.raises(ValueError, match="only tcp endpoints"):
        rank_endpoint(endpoint, 1)


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ("10.0.0.1:8000", "has no scheme (http:// or https://): write 'http://10.0.0.1:8000'"),
        ("engine", "has no scheme (http:// or https://): write 'http://engine'"),
        ("u:secret@h:1", "has no scheme (http:// or https://): write 'http://***@h:1'"),
        ("a b", "has the character"),
        ("h:99999", "has no scheme (http:// or https://)"),
        ("http://127.0.0.1:99999", "has the port 99999, where 1 to 65535 are possible"),
        ("http://[::1]:65536", "has the port 65536, where 1 to 65535 are possible"),
        ("http://h:0", "has the port 0, where 1 to 65535 are possible"),
        ("http://h:x", "a port that is no number"),
    ],
)
def test_an_http_base_is_refused_with_its_remedy(base: str, sentence: str) -> None:
    assert sentence in http_error(base)


@given(st.integers(65_536, 10**30), st.sampled_from(["h", "[::1]", "10.0.0.1", "u:7@h"]))
def test_a_port_that_is_too_large_is_named(port: int, host: str) -> None:
    assert f"the port {str(port)[:20]}, where" in http_error(f"http://{host}:{port}")


@given(st.text(max_size=40))
def test_a_remedy_works(text: str) -> None:
    if found := re.search(r": write '(http://[^*\']+)'$", http_error(text)):
        assert http_error(found[1]) == ""


HOST_SPELLINGS = {"a": ["a", "A", "a."], "127.0.0.1": ["127.0.0.1", "localhost"]}


def engine(id: str, host: str, base: int, **fields: object) -> EngineSettings:
    ports = {"address": 0, "metrics": 1, "events": 100, "replay": 200, "load": 300}
    whole = {
        key: f"{'http' if offset < 2 else 'tcp'}://{host}:{base + offset}"
        for key, offset in ports.items()
    }
    return EngineSettings(**{"id": id, "engine": "sglang", **whole, **fields})  # type: ignore[arg-type]


@given(
    key=st.sampled_from(["address", "metrics", "events", "replay", "load"]),
    spellings=st.sampled_from(list(HOST_SPELLINGS.values())),
    data=st.data(),
)
def test_two_workers_with_one_socket_are_seen_in_any_spelling(
    key: str, spellings: list[str], data: st.DataObject
) -> None:
    first = engine("a", data.draw(st.sampled_from(spellings)), 10_000, ranks=4)
    second = engine("b", data.draw(st.sampled_from(spellings)), 20_000, ranks=4)
    assert shared_socket([first, second]) is None
    rank = 0 if key in ("address", "metrics") else data.draw(st.integers(-3, 3))
    base, _, port = getattr(first, key).rpartition(":")
    slash = data.draw(st.sampled_from(["", "/"])) if key in ("address", "metrics") else ""
    copied = msgspec.structs.replace(second, **{key: f"{base}:{int(port) + rank}{slash}"})
    found = shared_socket([engine("c", "c", 1), first, copied])
    assert found is not None
    assert found[0] == 2
    assert found[1].startswith(f"{key}: ")
    assert "'a'" in found[1]


@given(
    nodes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    overlap=st.integers(0, 3),
    data=st.data(),
)
def test_nodes_of_a_group_share_a_host_and_its_base_ports_but_no_rank(
    nodes: list[int], overlap: int, data: st.DataObject
) -> None:
    pages = [f"http://h:{8000 + number}" for number in range(len(nodes))]
    firsts = [sum(nodes[:number]) for number in range(len(nodes))]
    workers = [
        EngineSettings(
            id=page, engine="vllm", address=page, events="tcp://h:5557", replay="tcp://h:5657",
            ranks=ranks, first_rank=first,
        )
        for page, ranks, first in zip(pages, nodes, firsts, strict=True)
    ]  # fmt: skip
    assert shared_socket(workers) is None
    moved = data.draw(st.integers(1, len(nodes) - 1))
    back = min(overlap, firsts[moved])
    workers[moved] = msgspec.structs.replace(workers[moved], first_rank=firsts[moved] - back)
    assert (shared_socket(workers) is None) == (back == 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=8))
def test_engines_on_hosts_of_their_own_share_nothing(engines: list[tuple[int, int]]) -> None:
    workers = [engine(f"{i}", f"h{i}", 1000 * p, ranks=n) for i, (p, n) in enumerate(engines)]
    assert shared_socket(workers) is None
    assert shared_socket([]) is None
