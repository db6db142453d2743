"""`kvroute relay`."""

from pathlib import Path
from typing import Any

import click
import msgspec

from events.plane.settings import DynamoSettings, EngineSettings
from router.cli.flags import ENGINE, read_config, settings_flags
from router.cli.run import run
from router.config.settings import ConfigError, RelayConfig
from router.processes.logs import set_up


@click.command()
@settings_flags(RelayConfig)
@click.option("--worker-id", f"{ENGINE}id", help="Worker id, unique in the fleet.")
@click.option("--engine", f"{ENGINE}engine", help="vllm, sglang or dynamo. [vllm]")
@click.option("--address", f"{ENGINE}address", help="Where clients send their requests.")
@click.option("--events", f"{ENGINE}events", help="Its event publisher, tcp://... [it has none]")
@click.option(
    "--events-bind",
    f"{ENGINE}events_bind",
    is_flag=True,
    default=None,
    help="Bind the endpoint: the engine's publisher connects.",
)
@click.option("--replay", f"{ENGINE}replay", help="The engine's replay socket, tcp://...")
@click.option("--topic", f"{ENGINE}topic", help="ZMQ topic prefix.")
@click.option("--metrics", f"{ENGINE}metrics", help="The engine's HTTP base. [the address]")
@click.option("--load", f"{ENGINE}load", help="SGLang's LoadStat feed, tcp://...")
@click.option("--ranks", f"{ENGINE}ranks", type=int, help="Data-parallel ranks. [1]")
@click.option("--model", f"{ENGINE}model", help="Model name. [what the engine says]")
@click.option("--block-size", f"{ENGINE}block_size", type=int, help="Canonical block size.")
@click.option("--role", f"{ENGINE}role", help="both, prefill or decode. [SGLang's, or both]")
@click.option("--kv-connector", f"{ENGINE}kv_connector", help="vLLM's, to hand KV caches over.")
@click.option("--kv-engine-id", f"{ENGINE}kv_engine_id", help="vLLM's engine_id.")
@click.option("--bootstrap-host", f"{ENGINE}bootstrap_host", help="Where decode engines find it.")
@click.option("--bootstrap-port", f"{ENGINE}bootstrap_port", type=int, help="The port there.")
@click.option("--slots", f"{ENGINE}slots", type=int, help="Requests that run at once.")
@click.option(
    "--warm",
    f"{ENGINE}warm",
    is_flag=True,
    default=None,
    help="Let routers have it compute hot prefixes (their routing.hot_prefixes).",
)
@click.option(
    "--loads-loras",
    f"{ENGINE}loads_loras",
    is_flag=True,
    default=None,
    help="The engine loads a LoRA that it doesn't list when a request names it.",
)
@click.option("--label", f"{ENGINE}labels", multiple=True, help="NAME=VALUE, repeatable.")
@click.option("--subject", f"{ENGINE}subject", help="dynamo: where the workers publish, on NATS.")
@click.option("--load-subject", f"{ENGINE}load_subject", help="dynamo: their kv_metrics.")
@click.option("--dynamo-nats", f"{ENGINE}nats_url", help="dynamo: its NATS. [the routers']")
@click.option(
    "--dynamo-nats-credentials",
    f"{ENGINE}nats_credentials_file",
    help="dynamo: .creds file for its NATS.",
)
@click.option("--max-model-len", f"{ENGINE}max_model_len", type=int, help="dynamo: tokens.")
@click.option("--total-blocks", f"{ENGINE}total_blocks", type=int, help="dynamo: of a rank.")
@click.option(
    "--worker-timeout-s",
    f"{ENGINE}worker_timeout_s",
    type=float,
    help="dynamo: silence after which a worker counts as gone. [300]",
)
def relay(config_file: Path | None, **given: Any) -> None:  # fmt: skip
    """Relay an engine's KV events and load to the routers.

    Runs beside one engine, described by flags, or several, described under `workers:` in the file.
    With --engine dynamo it follows all workers of a fleet under NVIDIA Dynamo, on NATS.
    """
    config = read_config(RelayConfig, config_file, given)
    engine = {
        name.removeprefix(ENGINE): value
        for name, value in given.items()
        if name.startswith(ENGINE) and value not in (None, ())
    }
    dynamo: list[DynamoSettings] = []
    if engine.get("engine") == "dynamo":
        dynamo.append(_dynamo(engine))
    elif engine:
        config = _with_engine(config, engine)
    set_up(config.log)

    async def running() -> int:
        from router.processes.relay_process import RelayApp

        return await RelayApp(config, dynamo).run()

    run(running())


def _with_engine(config: RelayConfig, given: dict[str, Any]) -> RelayConfig:
    fields = {"engine": "vllm", **given}
    fields["labels"] = _labels(given)
    _check_given(fields, {"--worker-id": "id", "--address": "address"}, "one engine")
    try:
        settings = msgspec.convert(fields, EngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"flags: {error}") from error
    if any(worker.id == settings.id for worker in config.workers):
        raise ConfigError(f"the id {settings.id!r} is used twice, by --worker-id and in the file")
    return msgspec.structs.replace(config, workers=(*config.workers, settings))


def _dynamo(given: dict[str, Any]) -> DynamoSettings:
    fields = {name: value for name, value in given.items() if name != "engine"}
    if "id" in fields:
        fields["worker_id"] = fields.pop("id")
    fields["labels"] = _labels(given)
    needed = {
        "--subject": "subject",
        "--address": "address",
        "--model": "model",
        "--block-size": "block_size",
    }
    _check_given(fields, needed, "a Dynamo fleet")
    try:
        return msgspec.convert(fields, DynamoSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"flags: {error}") from error


def _check_given(fields: dict[str, Any], needed: dict[str, str], what: str) -> None:
    """Raises ConfigError unless every flag that is needed was given."""
    missing = [flag for flag, name in needed.items() if name not in fields]
    if missing:
        raise ConfigError(f"to relay {what}, give {', '.join(missing)} too")


def _labels(given: dict[str, Any]) -> dict[str, str]:
    labels = {}
    for label in given.get("labels", ()):
        name, separator, value = label.partition("=")
        if not separator or not name:
            raise ConfigError(f"--label {label!r}: write NAME=VALUE")
        labels[name] = value
    return labels
