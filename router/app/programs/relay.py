"""The command `kvroute relay`."""

from pathlib import Path
from typing import Any

import click
import msgspec

from events.engines.endpoints import http_error
from events.plane.mistakes import of_value
from events.plane.settings import DynamoSettings, shared_socket
from router.app.cli.engine_flags import (
    ENGINE,
    dynamo_flags,
    engine_flags,
    engine_settings,
    given_engine,
)
from router.app.cli.flags import read_config, settings_flags
from router.app.cli.run import run
from router.app.processes.logs import set_up
from router.config.keys import ConfigError
from router.config.settings.configurations import RelayConfig


@click.command()
@settings_flags(RelayConfig)
@engine_flags(engines=["dynamo"])
@dynamo_flags
def relay(config_file: Path | None, **given: Any) -> None:
    """Relay an engine's KV events and load to the routers.

    Runs beside one engine, described by flags, or several, described under `workers:` in the file.
    The engine is vLLM unless --engine says otherwise. With --engine dynamo the relay follows all
    workers of a fleet under NVIDIA Dynamo, on NATS.
    """
    engine = given_engine(given)
    flags = {name: value for name, value in given.items() if not name.startswith(ENGINE)}
    config = read_config(RelayConfig, config_file, flags)
    dynamo: list[DynamoSettings] = []
    if engine.get("engine") == "dynamo":
        dynamo.append(_dynamo(engine))
    elif engine:
        config = _with_engine(config, engine)
    set_up(config.log)

    async def running() -> int:
        from router.app.processes.relay_process import RelayApp

        return await RelayApp(config, dynamo).run()

    run(running())


def _with_engine(config: RelayConfig, given: dict[str, Any]) -> RelayConfig:
    _check_given(given, {"--worker-id": "id", "--address": "address"}, "one engine")
    settings = engine_settings({"engine": "vllm", **given})
    if any(worker.id == settings.id for worker in config.workers):
        raise ConfigError(f"the id {settings.id!r} is used twice, by --worker-id and in the file")
    workers = (*config.workers, settings)
    if (twice := shared_socket(workers)) is not None:
        raise ConfigError(f"flags: {twice[1]}")
    return msgspec.structs.replace(config, workers=workers)


def _dynamo(given: dict[str, Any]) -> DynamoSettings:
    fields = {name: value for name, value in given.items() if name != "engine"}
    if "id" in fields:
        fields["worker_id"] = fields.pop("id")
    needed = {
        "--subject": "subject",
        "--address": "address",
        "--model": "model",
        "--block-size": "block_size",
    }
    _check_given(fields, needed, "a Dynamo fleet")
    try:
        settings = msgspec.convert(fields, DynamoSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"flags: {of_value(error, DynamoSettings)}") from error
    # A number is no host, and a name no port: the id may stand in the place of either.
    errors = [http_error(settings.address.replace("{worker_id}", each)) for each in ("w", "1")]
    if all(errors):
        raise ConfigError(f"--address: {errors[0]}")
    return settings


def _check_given(fields: dict[str, Any], needed: dict[str, str], what: str) -> None:
    """Raises ConfigError unless every flag that is needed was given."""
    missing = [flag for flag, name in needed.items() if name not in fields]
    if missing:
        raise ConfigError(f"to relay {what}, give {', '.join(missing)} too")
