"""The traffic and the fleets that a command runs, from its options.

Modules that take long to import are imported when a command runs, so that `kvroute --help` is fast.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from simulator.study.comparison import Traffic
    from simulator.traffic.results import Slo
    from simulator.world.options import RunOptions


def traffic_of(name: str, given: dict[str, Any], slo: "Slo | None" = None) -> "Traffic":
    from simulator.study.comparison import Traffic
    from simulator.traffic.callers import Callers, Priorities
    from simulator.traffic.trace_columns import TraceError
    from simulator.traffic.trace_file import load_trace

    try:
        trace = load_trace(name, given["trace_block_size"])
    except TraceError as error:
        raise click.UsageError(str(error)) from error
    try:
        callers = Callers(
            tenants=given["tenants"],
            skew=given["tenant_skew"],
            priorities=Priorities.parse(given["priority_of"]),
            ttft_slo_s=None if slo is None else slo.ttft_s,
            tpot_slo_s=None if slo is None else slo.itl_s,
        )
    except ValueError as error:
        raise click.UsageError(f"--priority-of: {error}") from error
    played = ("tick_s", "from_s", "until_s", "warm_up_s", "warm_up_requests")
    return Traffic(trace=trace, callers=callers, **{name: given[name] for name in played})


def fleets_of(
    policy: str | None, compare: str, orders: str, workers: int, given: dict[str, Any]
) -> "list[RunOptions]":
    """The options of a run for each policy and each order of the router's queue.

    policy, compare, orders: values of --policy, --compare and --order. given: the command's other
    options. Raises UsageError.
    """
    first = fleet_of(policy, workers, given)
    more = _names(compare)
    more.pop(first.policy, None)
    fleets = [first, *(fleet_of(name, workers, given) for name in more)]
    try:
        return [
            replace(fleet, queue=msgspec.structs.replace(fleet.queue, order=order))
            for fleet in fleets
            for order in _names(orders) or [fleet.queue.order]
        ]
    except ValueError as error:
        raise click.UsageError(f"--order: {error}") from error


def _names(text: str) -> dict[str, None]:
    """The names in a text, which commas separate; each once, in their order."""
    return dict.fromkeys(filter(None, map(str.strip, text.split(","))))


_AS_GIVEN = (
    "ranks", "engine", "replicas", "event_delay_s", "event_jitter_s", "event_loss",
    "approximate_workers", "past_router_share", "engines_per_host", "hosts_per_rack",
)  # fmt: skip
"""Options of the commands that are fields of RunOptions under the same names."""


def fleet_of(policy: str | None, workers: int, given: dict[str, Any]) -> "RunOptions":
    """The options of all runs of a policy.

    policy: None: the configured policy. workers: size of the smallest fleet that is run. given: the
    command's other options. Raises UsageError for options that can't be run.
    """
    from router.config.reading import load
    from router.config.settings.configurations import ServeConfig
    from simulator.traffic.trace import check_block_size
    from simulator.world.options import Disaggregation, Failure, RunOptions

    _check_fits(workers, given)
    flags: dict[tuple[str, ...], object] = {}
    if given["preset"] is not None:
        flags["routing", "preset"] = given["preset"]
    for key, text in given["queue_settings"].items():
        flags["queue", *key.split(".")] = _yaml(key, text)
    prefill_workers = given["prefill_workers"]
    try:
        config = load(ServeConfig, given["config_file"], {}, flags)
        check_block_size(given["block_size"], given["trace_block_size"])
        return RunOptions(
            policy=policy or config.routing.policy,
            workers=workers,
            scheduler=scheduler_of(given, ranks=given["ranks"], joined_steps_max=_JOINED_STEPS),
            routing=config.routing,
            queue=config.queue,
            shadows=given.get("shadows", ()),
            disaggregation=None if prefill_workers is None else Disaggregation(prefill_workers),
            hot_prefixes=given["hot_prefixes"] or config.routing.hot_prefixes.enabled,
            failures=tuple(
                Failure(at_s=at_s, worker=worker, down_s=down_s)
                for worker, at_s, down_s in given["failures"]
            ),
            **{name: given[name] for name in _AS_GIVEN},
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _yaml(key: str, text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"--queue {key}={text}: not YAML: {error}") from error


def _check_fits(workers: int, given: dict[str, Any]) -> None:
    """Raises UsageError, with the flag's name, for options that need a fleet of more workers, and
    for a jitter above the delay."""
    needed = [("--fail", worker + 1) for worker, _, _ in given["failures"]]
    needed.append(("--approximate-workers", given["approximate_workers"]))
    if given["prefill_workers"] is not None:
        needed.append(("--prefill-workers", given["prefill_workers"] + 1))
    for option, count in needed:
        if count > workers:
            raise click.UsageError(f"{option}: needs a fleet of {count} workers, not {workers}")
    if given["event_jitter_s"] > given["event_delay_s"]:
        raise click.UsageError("--event-jitter-ms: must be at most --event-delay-ms")


def scheduler_of(given: dict[str, Any], *, ranks: int = 1, joined_steps_max: int = 1) -> Any:
    """The configuration of each engine's scheduler. given: the command's options. joined_steps_max:
    see SchedulerConfig. Raises ValueError for options that don't go together."""
    from simulator.engines.profile import load_profile
    from simulator.schedulers import SCHEDULERS
    from simulator.schedulers.options import scheduler_config

    options = dict(given["engine_options"])
    if given["host_blocks"] is not None:
        if not hasattr(SCHEDULERS[given["engine"]].config, "host_block_count"):
            raise ValueError(f"--host-blocks: {given['engine']} has no host cache here")
        options["host_block_count"] = str(given["host_blocks"])
    config = scheduler_config(
        given["engine"],
        load_profile(given["profile"]),
        block_size=given["block_size"],
        block_count=given["blocks"],
        ranks=ranks,
        joined_steps_max=joined_steps_max,
        options=options,
    )
    SCHEDULERS[given["engine"]].scheduler(config)  # raises if the options don't go together
    return config


_JOINED_STEPS = 10_000
"""Most consecutive decode steps that a run computes as one, where no decision is between them."""


def about(traffic: "Traffic") -> str:
    trace = traffic.trace.spread(traffic.tick_s)
    ticks = f", stamped in ticks of {trace.tick_s:.3g} s, which are spread" if trace.tick_s else ""
    loop = ", turns wait for the turns before them" if trace.is_closed_loop else ""
    headline = f"{trace.name}: {len(trace.requests)} requests{ticks}{loop}"
    width = max((len(use.name) for use in trace.columns), default=0)
    return "\n".join([headline, *(f"  {use.name:{width}}  {use.meaning}" for use in trace.columns)])
