"""Configuration: three sources, one tree, and every mistake named by its key."""

import re
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from events.plane.settings import Settings
from router.config.keys import ConfigError, Key, keys
from router.config.reading import FILE_BYTES_MAX, load
from router.config.rendering import render
from router.config.settings.configurations import GatewayConfig, RelayConfig, ServeConfig
from router.config.yaml_text import parse_yaml
from router.decide.policies import POLICIES

SERVE_KEYS = list(keys(ServeConfig))
RELAY_KEYS = list(keys(RelayConfig))
COMPOUND = (
    ("models",),
    ("workers",),
    ("engines", "numbers"),
    ("routing", "parameters"),
    ("routing", "own_policies"),
    ("routing", "pair_labels"),
    ("routing", "label_shares"),
    ("routing", "guard", "policies"),
    ("routing", "affinity", "bonus"),
    ("picker", "objectives"),
    ("discovery", "kubernetes", "ports"),
    ("queue", "bands"),
    ("queue", "tenants", "named"),
    ("console", "hosts"),
    ("gateway", "cors_origins"),
)
SCALARS = [key for key in SERVE_KEYS if key.path not in COMPOUND]

SERVICE_LINKS = {
    "KVROUTE_SERVICE_HOST": "10.0.0.1",
    "KVROUTE_SERVICE_PORT": "50051",
    "KVROUTE_SERVICE_PORT_GRPC": "50051",
    "KVROUTE_PORT": "tcp://10.0.0.1:50051",
    "KVROUTE_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "KVROUTE_PORT_50051_TCP_PROTO": "tcp",
    "KVROUTE_PORT_50051_TCP_PORT": "50051",
    "KVROUTE_PORT_50051_TCP_ADDR": "10.0.0.1",
    "KVROUTE_PORT_53_UDP": "udp://10.0.0.1:53",
    "KVROUTE_PORT_9_SCTP": "sctp://10.0.0.1:9",
    "KVROUTE_METRICS_SERVICE_HOST": "10.0.0.2",
    "KVROUTE_METRICS_SERVICE_PORT_HTTP": "9464",
    "KVROUTE_METRICS_PORT": "tcp://10.0.0.2:9464",
    "KVROUTE_METRICS_PORT_9464_TCP_ADDR": "10.0.0.2",
}
"""What a Service called kvroute, and one called kvroute-metrics, give every pod beside them."""

WORKER = {"id": "w0", "engine": "vllm", "address": "http://w0", "events": "tcp://w0:5557"}


def named(key: Key) -> str:
    return key.dotted


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "kvroute.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def of_file(tmp_path: Path, text: str) -> ServeConfig:
    return load(ServeConfig, written(tmp_path, text), {}, {})


def of_environment(**variables: str) -> ServeConfig:
    return load(ServeConfig, None, variables, {})


def mistake(*args: Any, config: type[Settings] = ServeConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, *args)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def other_value(key: Key) -> object:
    """A value that a key may have, and by default has not."""
    special = {
        "fleet.name": "other",
        "log.format": "json",
        "log.level": "debug",
        "gateway.client_share": 0.25,
        "routing.shadow_share": 0.5,
        "decision_log.share": 0.5,
        "tracing.share": 0.5,
        "routing.preset": "chat",
        "queue.aging": 2.0,
        "queue.tenant_share": 0.5,
        "queue.early_refusal": "slo",
        "queue.tenants.cached_price": 0.5,
        "grpc.unix_socket_mode": "0660",
        "metrics.tls": "server",
        "picker.tls": "server",
        "gateway.salt": "tenant",
        "gateway.forward": "tokens",
        "picker.pairs": "llm-d",
        "requests.priority": "lower",
    }
    if key.dotted in special:
        return special[key.dotted]
    types = [one for one in (get_args(key.type) or (key.type,)) if one is not NoneType]
    match types[0]():
        case bool():
            return not key.default
        case int():
            return int(key.default or 0) + 1
        case float():
            return float(str(key.default)) + 1.5
        case _:
            return f"some-{key.path[-1]}"


def value_of(config: object, key: Key) -> object:
    for name in key.path:
        config = getattr(config, name)
    return config


class TestDefaults:
    def test_nothing_said_is_a_configuration(self) -> None:
        assert load(ServeConfig, None, {}, {}) == ServeConfig()
        assert load(RelayConfig, None, {}, {}) == RelayConfig()

    def test_an_empty_file_says_nothing(self, tmp_path: Path) -> None:
        assert of_file(tmp_path, "# all commented out\n") == ServeConfig()

    def test_defaults_are_those_of_the_design(self) -> None:
        config = ServeConfig()
        assert config.routing.policy in POLICIES
        assert config.routing.policy == "dynamo-adaptive"
        assert config.routing.expected_output_tokens == 1
        assert config.routing.lease_s == 120.0
        assert config.grpc.listen.startswith("127.0.0.1:")
        assert config.metrics.listen.startswith("127.0.0.1:")
        assert config.nats.url is None

    def test_router_and_relay_on_one_host_do_not_meet(self) -> None:
        serve, relay = ServeConfig(), RelayConfig()
        assert serve.metrics.listen != relay.metrics.listen
        assert serve.fleet.name == relay.fleet.name


class TestKeys:
    @pytest.mark.parametrize("key", SERVE_KEYS + RELAY_KEYS, ids=named)
    def test_every_key_has_a_variable_a_flag_and_a_description(self, key: Key) -> None:
        assert key.variable == "KVROUTE_" + "_".join(key.path).upper()
        assert key.flag == "--" + "-".join(key.path).replace("_", "-")
        assert key.description

    @pytest.mark.parametrize("all_keys", [SERVE_KEYS, RELAY_KEYS], ids=["serve", "relay"])
    def test_no_two_keys_share_a_variable_or_a_flag(self, all_keys: list[Key]) -> None:
        assert len({key.variable for key in all_keys}) == len(all_keys)
        assert len({key.flag for key in all_keys}) == len(all_keys)

    @pytest.mark.parametrize("key", SCALARS, ids=named)
    def test_every_key_can_be_set_by_file_variable_and_flag(self, key: Key, tmp_path: Path) -> None:
        value = other_value(key)
        assert value != key.default
        tree: Any = value
        for name in reversed(key.path):
            tree = {name: tree}
        text = str(value).lower() if isinstance(value, bool) else str(value)
        by_file = of_file(tmp_path, yaml.safe_dump(tree))
        by_variable = of_environment(**{key.variable: text})
        by_flag = load(ServeConfig, None, {}, {key.path: value})
        assert value_of(by_file, key) == value
        assert by_file == by_variable == by_flag

    def test_lists_can_be_set_by_file_and_variable(self, tmp_path: Path) -> None:
        text = yaml.safe_dump([WORKER])
        assert of_file(tmp_path, yaml.safe_dump({"workers": [WORKER]})) == of_environment(
            KVROUTE_WORKERS=text
        )

    def test_configurations_are_frozen(self) -> None:
        with pytest.raises(AttributeError):
            ServeConfig().routing.policy = "round-robin"  # type: ignore[misc]


class TestPrecedence:
    def test_flags_over_environment_over_file_over_defaults(self, tmp_path: Path) -> None:
        file = written(tmp_path, "routing: {lease_s: 1, session_ttl_s: 1, alternatives: 1}\n")
        environment = {
            "KVROUTE_ROUTING_SESSION_TTL_S": "2",
            "KVROUTE_ROUTING_ALTERNATIVES": "2",
        }
        config = load(ServeConfig, file, environment, {("routing", "alternatives"): 3})
        routing = config.routing
        assert (routing.lease_s, routing.session_ttl_s, routing.alternatives) == (1, 2, 3)
        assert routing.policy == "dynamo-adaptive"

    def test_one_source_leaves_the_other_keys_of_a_section_alone(self, tmp_path: Path) -> None:
        file = written(tmp_path, "nats: {url: 'nats://a', user: u}\n")
        config = load(ServeConfig, file, {"KVROUTE_NATS_URL": "nats://b"}, {})
        assert (config.nats.url, config.nats.user) == ("nats://b", "u")

    def test_an_empty_variable_of_a_key_that_may_be_absent_means_absent(
        self, tmp_path: Path
    ) -> None:
        file = written(tmp_path, "nats: {url: 'nats://a'}\n")
        config = load(ServeConfig, file, {"KVROUTE_NATS_URL": ""}, {})
        assert config.nats.url is None
        assert of_environment(KVROUTE_METRICS_LISTEN="").metrics.listen == "", "no such key"


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "key"),
        [
            ("polcy: round-robin\n", "polcy"),
            ("routing: {polcy: round-robin}\n", "polcy"),
            ("workers: [{id: a, adress: x}]\n", "adress"),
            ("models: [{name: a, alias: [b]}]\n", "alias"),
        ],
    )
    def test_an_unknown_key_of_the_file_is_named(self, tmp_path: Path, text: str, key: str) -> None:
        message = mistake(written(tmp_path, text), {}, {})
        assert f"`{key}`" in message
        assert "kvroute.yaml" in message

    @pytest.mark.parametrize(
        "variable",
        ["KVROUTE_POLICY", "KVROUTE_ROUTING_POLCY", "KVROUTE_", "KVROUTE_ROUTING", "KVROUTE_PORT"],
    )
    def test_an_unknown_variable_is_named(self, variable: str) -> None:
        message = mistake(None, {variable: "1"}, {})
        assert message.startswith(f"environment: {variable} names no key of the configuration")

    def test_the_nearest_variable_is_named(self) -> None:
        message = mistake(None, {"KVROUTE_QUEUE_TIMEOUT": "1"}, {})
        assert message.endswith(", did you mean `KVROUTE_QUEUE_TIMEOUT_S`?")

    def test_variables_of_others_are_none_of_ours(self) -> None:
        assert of_environment(PATH="/bin", KVROUTER_X="1", kvroute_x="1") == ServeConfig()

    def test_variables_of_the_command_line_are_no_keys(self) -> None:
        assert of_environment(KVROUTE_CONFIG="f", KVROUTE_TARGET="h:1") == ServeConfig()

    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("routing: {lease_s: soon}\n", "$.routing.lease_s"),
            ("routing: {lease_s: 0}\n", "$.routing.lease_s"),
            ("routing: {lease_s: -1}\n", "$.routing.lease_s"),
            ("routing: {lease_s: .inf}\n", "$.routing.lease_s"),
            ("routing: {lease_s: .nan}\n", "$.routing.lease_s"),
            ("routing: {alternatives: 17}\n", "$.routing.alternatives"),
            ("routing: {alternatives: -1}\n", "$.routing.alternatives"),
            ("routing: {alternatives: 1.5}\n", "$.routing.alternatives"),
            ("routing: {expected_output_tokens: 4097}\n", "$.routing.expected_output_tokens"),
            ("routing: {prompt_tokens_max: 0}\n", "$.routing.prompt_tokens_max"),
            ("routing: {reservations_max: 0}\n", "$.routing.reservations_max"),
            ("routing: {policy_per_request: maybe}\n", "$.routing.policy_per_request"),
            ("routing: {lease_s: x}\n", "$.routing.lease_s"),
            ("grpc: {listen: 50051}\n", "$.grpc.listen"),
            ("fleet: {name: 'a.b'}\n", "$.fleet.name"),
            ("fleet: {name: ''}\n", "$.fleet.name"),
            ("fleet: {workers_max: 0}\n", "$.fleet.workers_max"),
            ("log: {level: loud}\n", "$.log.level"),
            ("log: {format: xml}\n", "$.log.format"),
            ("nats: {password: 5}\n", "$.nats.password"),
            ("ready_timeout_s: null\n", "$.ready_timeout_s"),
            ("drain_timeout_s: .inf\n", "$.drain_timeout_s"),
            ("grpc:\n", "$.grpc"),
            ("workers: {}\n", "$.workers"),
            ("workers: [{id: ''}]\n", "$.workers[0].id"),
        ],
    )
    def test_a_wrong_value_names_its_key(self, tmp_path: Path, text: str, where: str) -> None:
        message = mistake(written(tmp_path, text), {}, {})
        assert message.endswith(f"`{where}`")
        assert "kvroute.yaml: " in message

    @pytest.mark.parametrize(
        ("variable", "text"),
        [
            ("KVROUTE_ROUTING_LEASE_S", "soon"),
            ("KVROUTE_ROUTING_LEASE_S", ""),
            ("KVROUTE_ROUTING_LEASE_S", "["),
            ("KVROUTE_ROUTING_LEASE_S", ".nan"),
            ("KVROUTE_ROUTING_ALTERNATIVES", "many"),
            ("KVROUTE_GRPC_ANY_ADDRESS", "2"),
            ("KVROUTE_LOG_LEVEL", "loud"),
            ("KVROUTE_WORKERS", "w0"),
            ("KVROUTE_WORKERS", "[{id: a, id: b}]"),
        ],
    )
    def test_a_wrong_variable_is_named(self, variable: str, text: str) -> None:
        message = mistake(None, {variable: text}, {})
        assert message.startswith(f"environment: {variable}: ")

    def test_a_wrong_flag_names_its_key(self) -> None:
        message = mistake(None, {}, {("routing", "alternatives"): 99})
        assert message.startswith("flags: ")
        assert message.endswith("`$.routing.alternatives`")

    def test_the_blame_goes_to_the_source_that_is_wrong(self, tmp_path: Path) -> None:
        file = written(tmp_path, "routing: {lease_s: -1}\n")
        message = mistake(file, {"KVROUTE_ROUTING_LEASE_S": "5"}, {("routing", "lease_s"): 5.0})
        assert "kvroute.yaml" in message

    @pytest.mark.parametrize(
        "text",
        [
            "routing: {policy: round-robin}\nrouting: {lease_s: 5}\n",
            "routing:\n  lease_s: 5\n  policy: round-robin\n  lease_s: 6\n",
        ],
    )
    def test_a_key_that_is_there_twice_is_refused(self, tmp_path: Path, text: str) -> None:
        message = mistake(written(tmp_path, text), {}, {})
        assert "twice" in message
        assert "line" in message

    def test_merge_keys_are_no_duplicates(self, tmp_path: Path) -> None:
        text = """
            workers:
            - &first {id: a, engine: vllm, address: "http://a", events: "tcp://a:1"}
            - {<<: *first, id: b, address: "http://b", events: "tcp://b:1"}
        """
        assert [one.id for one in of_file(tmp_path, text).workers] == ["a", "b"]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("- a\n", "expected a mapping of sections, not list"),
            ("hello\n", "expected a mapping of sections, not str"),
            ("routing: {policy: round-robin\n", "line"),
            ("1: 2\n", ""),
        ],
    )
    def test_a_file_that_is_no_configuration_is_refused(
        self, tmp_path: Path, text: str, told: str
    ) -> None:
        assert told in mistake(written(tmp_path, text), {}, {})

    def test_a_file_that_is_not_there_or_no_text_is_refused(self, tmp_path: Path) -> None:
        assert "No such file" in mistake(tmp_path / "none.yaml", {}, {})
        assert "directory" in mistake(tmp_path, {}, {})
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
        assert "binary" in mistake(tmp_path / "binary", {}, {})

    def test_worker_ids_and_model_names_are_unique(self, tmp_path: Path) -> None:
        workers = yaml.safe_dump({"workers": [WORKER, WORKER]})
        assert mistake(written(tmp_path, workers), {}, {}).endswith(
            "the id 'w0' is used twice - at `$.workers[1].id`"
        )
        models = "models: [{name: a, aliases: [b]}, {name: b}]\n"
        assert mistake(written(tmp_path, models), {}, {}).endswith(
            "the name 'b' is used twice - at `$.models[1]`"
        )
        assert "twice" in mistake(None, {"KVROUTE_WORKERS": yaml.safe_dump([WORKER] * 2)}, {})
        relay = mistake(written(tmp_path, workers), {}, {}, config=RelayConfig)
        assert "$.workers[1].id" in relay


class TestKubernetes:
    def test_variables_of_services_are_ignored(self) -> None:
        assert of_environment(**SERVICE_LINKS) == ServeConfig()
        assert load(RelayConfig, None, SERVICE_LINKS, {}) == RelayConfig()

    def test_no_key_is_taken_for_one_of_them(self) -> None:
        assert not {key.variable for key in SERVE_KEYS + RELAY_KEYS} & set(SERVICE_LINKS)
        for key in SCALARS:
            text = str(other_value(key)).lower()
            assert of_environment(**{key.variable: text}) != ServeConfig(), key.variable


class TestRender:
    def test_what_is_printed_reads_back_as_the_same(self, tmp_path: Path) -> None:
        config = of_environment(
            KVROUTE_ROUTING_POLICY="round-robin",
            KVROUTE_WORKERS=yaml.safe_dump([WORKER]),
            KVROUTE_NATS_URL="nats://broker:4222",
        )
        assert of_file(tmp_path, render(config)) == config

    def test_a_password_is_masked(self) -> None:
        config = of_environment(KVROUTE_NATS_USER="u", KVROUTE_NATS_PASSWORD="hunter2")
        assert "hunter2" not in render(config)
        assert "password: '***'" in render(config)
        assert yaml.safe_load(render(ServeConfig()))["nats"]["password"] is None

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("nats://joe:hunter2@broker:4222", "nats://***@broker:4222"),
            ("tls://hunter2@broker", "tls://***@broker"),
            ("joe:hunter2@broker:4222", "***@broker:4222"),
            ("nats://joe:hun@ter2@broker", "nats://***@broker"),
            ("nats://joe:hunter2://x@broker", "nats://***@broker"),
            ("nats://broker:4222", "nats://broker:4222"),
        ],
    )
    def test_a_brokers_credentials_are_masked(self, url: str, shown: str) -> None:
        text = render(of_environment(KVROUTE_NATS_URL=url))
        assert yaml.safe_load(text)["nats"]["url"] == shown
        assert "hunter2" not in text

    def test_credentials_in_a_workers_urls_are_masked_too(self) -> None:
        secret = "http://joe:hunter2@w0:8000"
        worker = WORKER | {"address": secret, "metrics": secret, "labels": {"owner": "a@b"}}
        text = render(of_environment(KVROUTE_WORKERS=yaml.safe_dump([worker])))
        assert "hunter2" not in text
        (shown,) = yaml.safe_load(text)["workers"]
        assert shown["address"] == "http://***@w0:8000"
        assert shown["labels"] == {"owner": "a@b"}

    def test_keys_come_in_the_order_of_their_sections(self) -> None:
        shown = list(yaml.safe_load(render(ServeConfig())))
        assert shown == [field.name for field in msgspec.structs.fields(ServeConfig)]


DEEP = 1_100
"""More than Python's bound of recursion, 1,000."""
HOSTILE = {
    "nested lists": b"[" * DEEP + b"]" * DEEP,
    "nested maps": b"{a: " * DEEP + b"1" + b"}" * DEEP,
    "nested in a section": b"routing: {parameters: " + b"{a: " * DEEP + b"1" + b"}" * (DEEP + 1),
    "nested by indentation": b"\n".join(b" " * i + b"a:" for i in range(DEEP)),
    "a list in itself": b"workers: &a [*a]",
    "a map in itself": b"routing: &a {parameters: *a}",
    "an alias bomb": b"a: &a [1]\n"
    + b"".join(b"%c: &%c [*%c, *%c]\n" % (i + 1, i + 1, i, i) for i in range(ord("a"), ord("y"))),
    "a zero byte": b"grpc: {listen: 'a\x00b'}",
    "no text": b"\xff\xfe\x00",
    "half a character": b"log: {level: \xc3",
    "a time that is none": b"ready_timeout_s: 2026-99-99",
    "a tagged time": b"ready_timeout_s: !!timestamp x",
    "a tagged number": b"ready_timeout_s: !!float x",
    "a tagged integer": b"index: {memory_mib: !!int ''}",
    "a tagged switch": b"gateway: {observe: !!bool x}",
    "a tagged object": b"grpc: !!python/object/apply:os.getcwd []",
    "an unhashable key": b"{[a]: 1}",
    "a merge of nothing": b"<<: 1",
    "a sexagesimal": b"index: {memory_mib: 1:99:99:99:99:99:99:99:99}",
    "digits": b"index: {memory_mib: " + b"9" * 5000 + b"}",
    "too much": b"# " + b"x" * FILE_BYTES_MAX,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_no_configuration_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"kvroute\.yaml: .") as caught:
        load(ServeConfig, file, {}, {})
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: b: c", 1, "quote a text with a colon"),
        ("routing:\n  lease_s: 1\n   policy: round-robin", 3, "indent all keys"),
        ("workers:\n  - id: a\n   engine: b", 3, "all entries of a list, alike"),
        ("routing:\n\tlease_s: 1", 2, "with spaces, not with tabs"),
        ("fleet: {name: @a}", 1, "quote a text"),
        ("routing: {policy: ttft\n", 2, "while parsing a flow mapping that begins on line 1"),
        ("fleet:\n  name: 'a", 2, "quoted scalar"),
        ("fleet: {}\nfleet: {}", 2, "the key 'fleet' is there twice"),
        ("fleet: !!foo 1", 1, "tag"),
    ],
)
def test_an_error_of_yaml_is_one_line_with_its_place(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    message = mistake(written(tmp_path, text), {}, {})
    assert f"kvroute.yaml: line {line}, column " in message
    assert says in message
    assert "\n" not in message
    assert "<unicode string>" not in message


@given(st.text(alphabet="ab:- \t\n{}[]'\"&*!@%|>#,?\0\x85", max_size=60))
def test_any_text_is_a_configuration_or_one_line(text: str) -> None:
    said = ""
    try:
        tree = parse_yaml(text, "file: ")
    except ConfigError as error:
        said = str(error)
        tree = None
    if not said:
        assert tree == yaml.safe_load(text)
        return
    assert said.startswith("file: ")
    assert "<unicode string>" not in said
    assert "\n" not in said


@pytest.mark.parametrize("text", ["[" * 1100, "!!int ''", "!!timestamp x", "2026-99-99", "a\x00b"])
def test_a_variable_that_is_no_value_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="KVROUTE_READY_TIMEOUT_S"):
        load(ServeConfig, None, {"KVROUTE_READY_TIMEOUT_S": text}, {})


def test_a_path_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="null"):
        load(ServeConfig, Path("a\0b"), {}, {})


@pytest.mark.parametrize("number", [(1 << 53) + 1, 1 << 63, 10**30])
def test_every_integer_has_a_bound_that_names_its_key(number: int) -> None:
    for key in keys(ServeConfig):
        if key.type is int:
            with pytest.raises(ConfigError, match=re.escape(f"$.{key.dotted}`")):
                load(ServeConfig, None, {key.variable: str(number)}, {})


def test_the_index_cannot_outgrow_its_places() -> None:
    most = 64 << 10
    assert load(ServeConfig, None, {"KVROUTE_INDEX_MEMORY_MIB": f"{most}"}, {}).index.bytes_max()
    for over in (most + 1, 99_999_999_999_999):
        with pytest.raises(ConfigError, match=r"\$\.index\.memory_mib"):
            load(ServeConfig, None, {"KVROUTE_INDEX_MEMORY_MIB": f"{over}"}, {})


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"events": "nonsense"}, "events"),
        ({"events": "tcp://host"}, "events"),
        ({"events": "tcp://host:65535", "ranks": 2}, "events"),
        ({"events": "tcp://h:1", "replay": "tcp://h"}, "replay"),
        ({"metrics": "http://a..b"}, "metrics"),
        ({"metrics": f"http://{'l' * 64}"}, "metrics"),
        ({"load": "h"}, "load"),
        ({"address": "http://h:x"}, "address"),
        ({"address": "127.0.0.1:21000"}, "address"),
        ({"address": "h:1", "metrics": "http://h:1"}, "address"),
        ({"address": "grpc://h:1"}, "address"),
        ({"address": "http://H:2/"}, "address"),
        ({"metrics": "http://h:2"}, "metrics"),
        ({"slots": 1 << 31}, "slots"),
        ({"labels": {"l": "v" * 1025}}, "labels"),
    ],
)
@pytest.mark.parametrize("config", [ServeConfig, RelayConfig])
def test_a_worker_that_can_never_be_followed_is_refused_with_its_key(
    tmp_path: Path, config: type[ServeConfig | RelayConfig], entry: dict[str, object], key: str
) -> None:
    file = tmp_path / "kvroute.yaml"
    worker = {"id": "w", "engine": "vllm", "address": "http://h:1"} | entry
    good = {"id": "g", "engine": "vllm", "address": "http://h:2"}
    file.write_text(yaml.safe_dump({"workers": [good, worker]}))
    with pytest.raises(ConfigError, match=rf"\$\.workers\[1\]\.{key}"):
        load(config, file, {}, {})


@pytest.mark.parametrize("config", [ServeConfig, RelayConfig])
@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"GPU": "m"}, "'GPU' is no name"),
        ({"gpu-celsius": "m"}, "is no name"),
        ({"a" * 49: "m"}, "is no name"),
        ({"a": "no metric"}, "'no metric' is no name of a metric"),
        ({"a": 'm{gpu="0"}'}, "without labels"),
        ({"a\n": "m"}, "is no name"),
        ({"a": "m\n"}, "is no name of a metric"),
        ({"cache_hit_rate": "m"}, "kvroute has a cache_hit_rate of its own"),
        ({f"n{i}": "m" for i in range(9)}, "length <= 8"),
        ({"a": 5}, "`str`"),
    ],
)
def test_own_numbers_that_can_not_be_are_refused(
    config: type[ServeConfig | RelayConfig], numbers: dict[str, object], complaint: str
) -> None:
    tree = yaml.safe_dump(numbers)
    message = mistake(None, {"KVROUTE_ENGINES_NUMBERS": tree}, {}, config=config)
    assert complaint in message
    assert "engines" in message
    assert "numbers" in message


def test_own_numbers_are_read_by_processes_with_relays_alone(tmp_path: Path) -> None:
    file = written(tmp_path, "engines: {numbers: {preempted: 'vllm:num_preemptions_total'}}\n")
    for config in (ServeConfig, RelayConfig):
        numbers = load(config, file, {}, {}).engines.numbers
        assert numbers == {"preempted": "vllm:num_preemptions_total"}
    assert "numbers" in mistake(file, {}, {}, config=GatewayConfig)
