"""The `kvroute` command."""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, get_args, get_origin

import click
import msgspec

from events.plane.settings import DynamoSettings, EngineSettings, Settings
from router.cli.run import run
from router.config.settings import (
    Config,
    ConfigError,
    Key,
    RelayConfig,
    ServeConfig,
    keys,
    load,
    load_with_sources,
    render,
)
from router.config.sources import annotated
from router.processes.logs import set_up
from router.service.grpc_polling import prepare

Command = TypeVar("Command", bound=Callable[..., Any])
_ENGINE = "engine_"
"""Prefix of the parameters that describe a relay's one engine."""


def main() -> None:
    """Runs the command line; mistakes of the operator end with one line and exit code 2."""
    prepare(os.environ)
    try:
        sys.exit(cli(standalone_mode=False) or 0)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"kvroute: {error}", err=True)
        sys.exit(2)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvroute")
def cli() -> None:
    """A KV-cache-aware router for vLLM and SGLang fleets."""


def _settings_options(config: type[Settings]) -> Callable[[Command], Command]:
    """One flag for each scalar key of a configuration, and --config."""

    def decorate(command: Command) -> Command:
        for key in reversed([one for one in keys(config) if _is_scalar(one.type)]):
            command = _option(key)(command)
        return click.option(
            "--config",
            "-c",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="KVROUTE_CONFIG",
            help="YAML file.",
        )(command)

    return decorate


def _option(key: Key) -> Callable[[Command], Command]:
    names = [key.flag]
    if key.path == ("nats", "url"):
        names.append("--nats")
    if key.path == ("fleet", "name"):
        names.append("--fleet")
    shown = f"{key.default}" if key.default is not None else "none"
    told = key.description[:1].upper() + key.description[1:]
    kind: Any = str
    options = [one for one in get_args(key.type) if one is not type(None)] or [key.type]
    if get_origin(key.type) is Literal:
        kind = click.Choice([str(choice) for choice in get_args(key.type)])
    elif bool in options:
        kind = bool
    elif any(one is float or get_args(one)[:1] == (float,) for one in options):
        kind = float
    elif any(one is int or get_args(one)[:1] == (int,) for one in options):
        kind = int
    return click.option(
        *names, "__".join(key.path), type=kind, default=None, help=f"{told}. [{shown}]"
    )


def _is_scalar(hint: Any) -> bool:
    options = [hint, *get_args(hint)]
    return not any((get_origin(one) or one) in (tuple, dict) for one in options)


def _load(config: type[Config], file: Path | None, given: dict[str, Any]) -> Config:
    return load(config, file, os.environ, _flags(given))


def _flags(given: dict[str, Any]) -> dict[tuple[str, ...], object]:
    """The flags that were given, by the paths of their keys."""
    return {
        tuple(name.split("__")): value
        for name, value in given.items()
        if value is not None and not name.startswith(_ENGINE)
    }


@cli.command()
@_settings_options(ServeConfig)
def serve(config_file: Path | None, **given: Any) -> None:
    """Serve picks over gRPC.

    Every flag has a key in the YAML file (--grpc-listen is grpc.listen) and an environment variable
    (KVROUTE_GRPC_LISTEN); flags win over the environment, and that over the file. Models and
    workers with relays in this process are described in the file alone. SIGHUP reads the file
    again: policies and their parameters, hot prefixes, the shadow policy and the decision log
    change at once, other keys with a restart.
    """
    config = _load(ServeConfig, config_file, given)
    set_up(config.log)

    async def running() -> int:
        from router.processes.router_process import (
            RouterApp,  # grpc takes a while to import; --help needn't wait
        )

        read_again = partial(_load, ServeConfig, config_file, given)
        return await RouterApp(config, read_again=read_again).run()

    run(running())


@cli.command()
@_settings_options(RelayConfig)
@click.option("--worker-id", f"{_ENGINE}id", help="Worker id, unique in the fleet.")
@click.option("--engine", f"{_ENGINE}engine", help="vllm, sglang or dynamo. [vllm]")
@click.option("--address", f"{_ENGINE}address", help="Where clients send their requests.")
@click.option("--events", f"{_ENGINE}events", help="Its event publisher, tcp://... [it has none]")
@click.option(
    "--events-bind",
    f"{_ENGINE}events_bind",
    is_flag=True,
    default=None,
    help="Bind the endpoint: the engine's publisher connects.",
)
@click.option("--replay", f"{_ENGINE}replay", help="The engine's replay socket, tcp://...")
@click.option("--topic", f"{_ENGINE}topic", help="ZMQ topic prefix.")
@click.option("--metrics", f"{_ENGINE}metrics", help="The engine's HTTP base. [the address]")
@click.option("--load", f"{_ENGINE}load", help="SGLang's LoadStat feed, tcp://...")
@click.option("--ranks", f"{_ENGINE}ranks", type=int, help="Data-parallel ranks. [1]")
@click.option("--model", f"{_ENGINE}model", help="Model name. [what the engine says]")
@click.option("--block-size", f"{_ENGINE}block_size", type=int, help="Canonical block size.")
@click.option("--role", f"{_ENGINE}role", help="both, prefill or decode. [SGLang's, or both]")
@click.option("--kv-connector", f"{_ENGINE}kv_connector", help="vLLM's, to hand KV caches over.")
@click.option("--kv-engine-id", f"{_ENGINE}kv_engine_id", help="vLLM's engine_id.")
@click.option("--bootstrap-host", f"{_ENGINE}bootstrap_host", help="Where decode engines find it.")
@click.option("--bootstrap-port", f"{_ENGINE}bootstrap_port", type=int, help="The port there.")
@click.option("--slots", f"{_ENGINE}slots", type=int, help="Requests that run at once.")
@click.option(
    "--warm",
    f"{_ENGINE}warm",
    is_flag=True,
    default=None,
    help="Let routers have it compute hot prefixes (their routing.hot_prefixes).",
)
@click.option(
    "--loads-loras",
    f"{_ENGINE}loads_loras",
    is_flag=True,
    default=None,
    help="The engine loads a LoRA that it doesn't list when a request names it.",
)
@click.option("--label", f"{_ENGINE}labels", multiple=True, help="NAME=VALUE, repeatable.")
@click.option("--subject", f"{_ENGINE}subject", help="dynamo: where the workers publish, on NATS.")
@click.option("--load-subject", f"{_ENGINE}load_subject", help="dynamo: their kv_metrics.")
@click.option("--dynamo-nats", f"{_ENGINE}nats_url", help="dynamo: its NATS. [the routers']")
@click.option(
    "--dynamo-nats-credentials",
    f"{_ENGINE}nats_credentials_file",
    help="dynamo: .creds file for its NATS.",
)
@click.option("--max-model-len", f"{_ENGINE}max_model_len", type=int, help="dynamo: tokens.")
@click.option("--total-blocks", f"{_ENGINE}total_blocks", type=int, help="dynamo: of a rank.")
@click.option(
    "--worker-timeout-s",
    f"{_ENGINE}worker_timeout_s",
    type=float,
    help="dynamo: silence after which a worker counts as gone. [300]",
)
def relay(config_file: Path | None, **given: Any) -> None:  # fmt: skip
    """Relay an engine's KV events and load to the routers.

    Runs beside one engine, described by flags, or several, described under `workers:` in the file.
    With --engine dynamo it follows all workers of a fleet under NVIDIA Dynamo, on NATS.
    """
    config = _load(RelayConfig, config_file, given)
    engine = {
        name.removeprefix(_ENGINE): value
        for name, value in given.items()
        if name.startswith(_ENGINE) and value not in (None, ())
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


@cli.command("check-config")
@_settings_options(ServeConfig)
def check_config(config_file: Path | None, **given: Any) -> None:
    """Check a router's configuration and print it whole.

    The comment behind each value says where it came from: a flag, a variable of the environment,
    the file, the preset of routing.preset, or the defaults; the first of these that sets it wins.
    """
    from router.processes.router_process import RouterApp

    config, sources = load_with_sources(ServeConfig, config_file, os.environ, _flags(given))

    async def check() -> int:
        RouterApp(config)
        return 0

    run(check())
    click.echo(annotated(render(config), sources), nl=False)


@cli.command()
@click.option(
    "--presets",
    "as_presets",
    is_flag=True,
    help="List the presets instead: the settings of each, and the traces that it was chosen on.",
)
@click.option("--json", "as_json", is_flag=True, help="A list of objects.")
def policies(as_presets: bool, as_json: bool) -> None:
    """List the policies with their formulas.

    Their numbers are set in the file, under routing.parameters: {POLICY: {NAME: NUMBER}}. A policy
    of your own is a Python function, named module:function in routing.policy. A preset, named in
    routing.preset, is a set of such settings.
    """
    from router.policies import POLICIES

    if as_presets:
        _show_presets(as_json)
        return
    if as_json:
        rows = [
            {
                "name": one.name,
                "summary": one.summary,
                "formula": one.formula,
                "parameters": dict(one.parameters),
                "about": one.described(),
            }
            for one in POLICIES.values()
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for one in POLICIES.values():
        click.echo(f"{one.name}\n    {one.summary}\n    cost = {one.formula}")
        about = one.described()
        for name, value in one.parameters.items():
            click.echo(f"      {name} = {value:g}    ({about[name]})")


def _show_presets(as_json: bool) -> None:
    from dataclasses import asdict

    from router.config.presets import PRESETS, lines

    if as_json:
        rows = [{"name": name, **asdict(preset)} for name, preset in PRESETS.items()]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for name, preset in PRESETS.items():
        click.echo(f"{name}\n    {preset.summary}")
        for line in lines(preset.sets):
            click.echo(f"      {line}")
        click.echo(f"    chosen on: {preset.chosen_on}")


_target = click.option(
    "--target",
    "-t",
    default="127.0.0.1:50051",
    envvar="KVROUTE_TARGET",
    show_default=True,
    help="The router's gRPC address.",
)
_model = click.option("--model", "-m", default="", help="Model name.")
_timeout = click.option("--timeout", "timeout_s", default=5.0, show_default=True, help="Seconds.")


@cli.command()
@_target
@_model
@_timeout
@click.option("--json", "as_json", is_flag=True, help="What ListWorkers says, as JSON.")
def workers(target: str, model: str, timeout_s: float, as_json: bool) -> None:
    """Show the fleet as a router sees it."""
    from router.cli.fleet import show_workers

    run(show_workers(target, model, as_json, timeout_s))


@cli.command()
@_target
@_model
@_timeout
@click.option("--tokens", help="Prompt as token ids: 1,2,3 or @FILE.")
@click.option("--text", help="Prompt as text; needs --tokenize.")
@click.option("--tokenize", help="HTTP base of an engine whose /tokenize turns text into ids.")
@click.option("--policy", default="", help="Another policy than the configured one.")
@click.option("--lora", default="", help="LoRA name.")
@click.option("--cache-salt", default="", help="Cache salt.")
@click.option(
    "--phase",
    type=click.Choice(["aggregated", "prefill_decode", "prefill", "decode"]),
    default="aggregated",
    show_default=True,
    help="One worker, a pair, or one half.",
)
@click.option("--session", default="", help="Session; for decode it may stand for the prompt.")
@click.option("--json", "as_json", is_flag=True, help="The whole Explanation, as JSON.")
@click.option(
    "--receipt",
    "receipt_file",
    type=click.File("rb"),
    help="Work out anew what was decided instead: an answer with its receipts, one receipt, or a"
    " line of the decision log; JSON or protobuf's bytes; - for stdin.",
)
def explain(receipt_file: IO[bytes] | None, **asked: Any) -> None:
    """Show why a prompt would go where, or did. Nothing is reserved."""
    if receipt_file is not None:
        from router.cli.receipt import show_receipt

        raise click.exceptions.Exit(show_receipt(receipt_file))
    from router.cli.fleet import show_explanation

    run(show_explanation(**asked))


@cli.command("replay-log")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--policy",
    "names",
    multiple=True,
    required=True,
    help="Policy to ask; repeatable. One of your own: module:function.",
)
@click.option(
    "--config",
    "-c",
    "config_file",
    type=click.Path(path_type=Path),
    help="YAML file of a router, for its routing.parameters and routing.affinity.",
)
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON.")
def replay_log(
    files: tuple[Path, ...], names: tuple[str, ...], config_file: Path | None, as_json: bool
) -> None:
    """Ask other policies about logged decisions (decision_log.file).

    Tells how often each would have picked the same worker, and what its own choices would have
    changed, as predicted then: in the fleet that the policy which decided had filled.
    """
    from router.cli.replay_log import show_replay

    routing = load(ServeConfig, config_file, {}, {}).routing
    raise click.exceptions.Exit(show_replay(files, names, routing, as_json))


for command in entry_points(group="kvroute.commands"):
    cli.add_command(command.load())


if __name__ == "__main__":
    main()
