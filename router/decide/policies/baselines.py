"""Policies that ignore caches, for comparison."""

from router.decide.policies.candidates import Candidates
from router.decide.policies.policy import Parameters, Policy, Scores


def least_loaded(rows: Candidates, _: Parameters) -> Scores:
    """cost = active_slots + load / (1 + load): fewest requests, then the smallest load."""
    slots = rows.active_slots
    load = rows.load
    return Scores(slots + load / (1 + load), {"active_slots": slots, "load": load})


def round_robin(rows: Candidates, _: Parameters) -> Scores:
    """cost = ordinal of the worker's last pick: the worker picked longest ago is next.

    No list of workers has to be updated as they come and go.
    """
    return Scores(rows.last_picked, {"last_picked": rows.last_picked})


LEAST_LOADED = Policy(
    "least-loaded",
    "fewest requests running, waiting or under way; blind to caches",
    "active_slots + load / (1 + load)",
    Parameters(),
    least_loaded,
)
ROUND_ROBIN = Policy(
    "round-robin",
    "the worker whose turn is longest ago; blind to caches and load",
    "last_picked",
    Parameters(),
    round_robin,
)
