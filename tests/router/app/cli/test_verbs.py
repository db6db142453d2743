"""`kvroute register`, `drain`, `undrain`, `remove` and `resync`, on a served fleet."""

import json
from collections.abc import Mapping
from inspect import signature
from typing import Any

import click
import msgspec
import pytest

from events.plane.settings import LOCAL_KEYS, EngineSettings
from kvroute.client import KvRouteClient
from kvroute.v1 import RegisterWorkerRequest
from router.app.calls.dialing import CallFailed
from router.app.calls.fleet_changes import change_worker, register_worker
from router.app.calls.verbs import register, remove
from router.app.cli.engine_flags import engine_settings, flag_of, given_engine
from router.app.programs.relay import relay
from router.config.keys import ConfigError
from tests.stage.served import Served, served

ENGINE: dict[str, Any] = {
    "id": "w0",
    "engine": "sglang",
    "address": "http://w:8000",
    "events": "tcp://127.0.0.1:5557",
    "events_bind": True,
    "replay": "tcp://w:5567",
    "topic": "kv",
    "metrics": "http://w:8001",
    "load": "tcp://w:5577",
    "ranks": 2,
    "first_rank": 2,
    "model": "m",
    "model_aliases": ("n", "o"),
    "block_size": 32,
    "role": "decode",
    "kv_connector": "NixlConnector",
    "kv_engine_id": "engine-1",
    "bootstrap_host": "b",
    "bootstrap_port": 9000,
    "labels": {"zone": "a", "rack": "7=b"},
    "priority_scheduling": True,
    "warm": True,
    "slots": 8,
    "total_blocks": 4096,
    "loads_loras": True,
}
"""A value for each key that a caller may give, none of them the default."""
KEYS = {field.name for field in msgspec.structs.fields(EngineSettings)} - set(LOCAL_KEYS)


def words(engine: Mapping[str, Any]) -> list[str]:
    """Flags for an engine's keys."""
    given = []
    for key, value in engine.items():
        match value:
            case True:
                given.append(flag_of(key))
            case tuple():
                given += [f"{flag_of(key)}={one}" for one in value]
            case dict():
                given += [f"{flag_of(key)}={name}={one}" for name, one in value.items()]
            case _:
                given.append(f"{flag_of(key)}={value}")
    return given


def without_id(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in engine.items() if key != "id"}


def parsed(command: click.Command, *given: str) -> dict[str, Any]:
    """The engine that a command line describes."""
    return given_engine(command.make_context("kvroute", list(given)).params)


def about(stage: Served, *, as_json: bool = False) -> dict[str, Any]:
    target = f"127.0.0.1:{stage.server.port}"
    return {"target": target, "timeout_s": 5.0, "as_json": as_json}


def test_contract_client_flags_and_configuration_have_the_same_keys() -> None:
    fields = {field.name for field in RegisterWorkerRequest.DESCRIPTOR.fields}
    assert fields - {"worker_id"} | {"id"} == KEYS
    parameters = set(signature(KvRouteClient.register_worker).parameters)
    assert parameters - {"self", "worker_id", "timeout_s"} | {"id"} == KEYS
    flags = {flag for option in relay.params for flag in option.opts}
    assert {flag_of(key) for key in KEYS} <= flags
    flags = {flag for option in register.params for flag in option.opts}
    common = {"--target", "-t", "--timeout", "--json", "worker"} | {
        *("--tls", "--tls-ca", "--tls-certificate", "--tls-key", "--tls-name", "--token-file"),
    }
    assert flags == {flag_of(key) for key in KEYS - {"id"}} | common
    assert ENGINE.keys() == KEYS, "every key has a value in this test"
    needed = {"id": "w0", "engine": "vllm", "address": "a"}
    defaults = msgspec.structs.asdict(msgspec.convert(needed, EngineSettings))
    assert [key for key, value in ENGINE.items() if value == defaults[key]] == ["id"]


async def test_every_key_reaches_the_relay(capsys: pytest.CaptureFixture[str]) -> None:
    engine = parsed(register, "w0", *words(without_id(ENGINE)))
    async with served() as stage:
        await register_worker("w0", engine, **about(stage))
        assert stage.registered == [EngineSettings(**ENGINE)]
    told = capsys.readouterr().out
    assert told == (
        "worker w0 is registered; this router runs its relay (2 ranks) until the router stops.\n"
    )
    assert engine_settings(parsed(relay, *words(ENGINE))) == EngineSettings(**ENGINE)


async def test_keys_without_a_flag_have_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    engine = parsed(register, "w0", "--engine=vllm", "--address=http://a")
    async with served() as stage:
        await register_worker("w0", engine, **about(stage, as_json=True))
        assert stage.registered == [EngineSettings(id="w0", engine="vllm", address="http://a")]
    told = json.loads(capsys.readouterr().out)
    assert told == {"action": "register", "worker_id": "w0", "ranks": 1}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ranks": 0}, "--ranks: Expected `int` >= 1"),
        ({"block_size": 65537}, "--block-size: Expected `int` <= 65536"),
        ({"model_aliases": ("m" * 1025,)}, "--model-alias: Expected `str` of length <= 1024"),
        ({"labels": {"zone": "a" * 1025}}, "--label: Expected `str` of length <= 1024"),
        ({"events": None}, "--replay: needs an `events` endpoint"),
        ({"load": "nonsense"}, "--load: "),
        ({"metrics": None, "address": "grpc://a:1"}, "--warm: the engine has no HTTP base"),
        ({"id": ""}, "--worker-id: Expected `str` of length >= 1"),
    ],
)
def test_a_value_that_cannot_be_names_its_flag(wrong: dict[str, Any], told: str) -> None:
    given = {key: value for key, value in (ENGINE | wrong).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        engine_settings(given)
    assert str(caught.value).startswith(told)


def test_a_label_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="--label 'zone': write NAME=VALUE"):
        parsed(register, "w", "--engine=vllm", "--address=a", "--label=zone")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "Missing argument 'WORKER'"),
        (("w", "--address=http://a"), "Missing option '--engine'"),
        (("w", "--engine=vllm"), "Missing option '--address'"),
        (("w", "--engine=other", "--address=http://a"), "'other' is not one of"),
        (("w", "--engine=vllm", "--address=a", "--ranks=two"), "'two' is not a valid integer"),
        (("w", "--engine=vllm", "--address=a", "--timeout=0"), "0<x<=86400"),
        (("w", "--engine=vllm", "--address=a", "--target="), "expected HOST:PORT"),
        (("w", "--engine=vllm", "--address=a", "--target=h:99999"), "not from 1 to 65535"),
        (("w", "--engine=vllm", "--address=a", "--target=http://h:1"), "without http://"),
    ],
)
def test_wrong_arguments_are_refused_before_any_call(given: tuple[str, ...], told: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parsed(register, *given)
    assert told in caught.value.format_message()


@pytest.mark.parametrize("flag", ["--tombstone-s", "--timeout"])
@pytest.mark.parametrize("seconds", ["0", "-1", "86401", "nan", "inf"])
def test_seconds_are_more_than_0_and_a_day_at_most(flag: str, seconds: str) -> None:
    with pytest.raises(click.UsageError, match="is not in the range 0<x<=86400"):
        remove.make_context("remove", ["w", f"{flag}={seconds}"])


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("drain", "worker w0 is drained; it gets no new requests, and those that run there go on"),
        ("undrain", "worker w0 is back; it may get new requests"),
        ("remove", "worker w0 is removed; its heartbeats are ignored until the removal ends"),
        ("resync", "worker w0 is resynced; its blocks are forgotten and read again from its relay"),
    ],
)
async def test_a_command_says_what_it_did(
    capsys: pytest.CaptureFixture[str], action: str, told: str
) -> None:
    async with served() as stage:
        for rank in (0, 1):
            stage.fleet.add("w0", rank)
        await change_worker(action, "w0", **about(stage))
        assert capsys.readouterr().out == f"{told} (2 ranks). All replicas were sent the command.\n"
        assert [(one.action, one.worker_id) for one in stage.sent] == [(action, "w0")]


async def test_a_removal_carries_its_time_and_is_taken_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served() as stage:
        stage.fleet.add("w0")
        await change_worker("remove", "w0", tombstone_s=60.0, **about(stage))
        assert stage.sent[0].tombstone_s == 60.0
        capsys.readouterr()
        await change_worker("undrain", "w0", **about(stage))
        assert "is back; it may get new requests (none of its ranks is" in capsys.readouterr().out
        assert not stage.commands.removed("w0")


async def test_ranks_are_printed_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as stage:
        stage.fleet.add("w0")
        await change_worker("drain", "w0", **about(stage, as_json=True))
        told = json.loads(capsys.readouterr().out)
        assert told == {"action": "drain", "worker_id": "w0", "ranks": 1}


async def test_a_command_that_fails_says_why_on_one_line() -> None:
    async def failed(worker_id: str, stage: Served) -> str:
        with pytest.raises(CallFailed) as caught:
            await change_worker("drain", worker_id, **about(stage))
        (line,) = caught.value.message.splitlines()
        return line

    async with served() as stage:
        stage.fleet.add("w0")
        unknown = await failed("x\x1b[2J", stage)
        assert "UNKNOWN_WORKER: no worker 'x" in unknown
        assert "\x1b" not in unknown
        stage.broker_is_there = False
        assert "NO_BROKER: drain took effect here, but NATS is away" in await failed("w0", stage)
    target = about(stage)["target"]
    assert (await failed("w0", stage)).startswith(f"kvroute: {target}: UNAVAILABLE: ")
