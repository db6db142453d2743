"""What tests read off a fleet: decisions, overlaps, exclusions, refusals, the core's state."""

from typing import Any

import pytest

from indexer.identity import WorkerKey
from router.config.settings.routing_settings import GuardSettings
from router.decide.decision.decision import Decision, Overlap
from router.request.prompt import Prompt
from router.request.refusal import Refusal
from tests.stage.fleet import Fleet

UNGUARDED = GuardSettings(policies=())
"""So that a worker with a request in front keeps what is cheapest there."""


def overlaps(decision: Decision) -> list[Overlap]:
    return [decision.overlap(row) for row in range(len(decision.rows))]


def overlap(fleet: Fleet, asked: Prompt) -> Overlap:
    """Of the only worker."""
    (told,) = overlaps(fleet.decide(asked))
    return told


def overlap_of(fleet: Fleet, asked: Prompt, key: WorkerKey) -> Overlap:
    """Of one worker among several."""
    decision = fleet.decide(asked, model="m")
    return decision.overlap(decision.rows.workers.index(key))


def refused(fleet: Fleet, asked: Prompt, **about: Any) -> Refusal:
    """Why a request gets no worker; asserts that this changed nothing."""
    before = snapshot(fleet)
    with pytest.raises(Refusal) as caught:
        fleet.core.route(fleet.request(asked, **about), fleet.now_s)
    assert snapshot(fleet) == before, "a refusal changes nothing"
    return caught.value


def excluded(fleet: Fleet, asked: Prompt, **about: Any) -> dict[str, str]:
    """Worker -> why it can't be picked; those that can are left out."""
    decision = fleet.decide(asked, **about)
    rows = zip(decision.rows.workers, decision.excluded, strict=True)
    not_live = ((source.key, reason) for source, reason in decision.not_live)
    return {key.worker_id: reason for key, reason in (*rows, *not_live) if reason}


def snapshot(fleet: Fleet) -> object:
    core = fleet.core
    return fleet.loads(), repr(core.reservations), core.endings.total(), dict(core.fleet.drained)
