"""A worker gets another slot with every snapshot; the one it leaves is the next worker's."""

import pytest

from indexer.identity import WorkerKey
from indexer.kernel import NativeIndex
from tests.stage.fleet import Fleet, prompt


def adopt(fleet: Fleet, key: WorkerKey) -> None:
    """A worker's relay sends all its blocks again: none."""
    relay = fleet.relays[key]
    fleet.view.resync(key.worker_id, fleet.now_s)
    fleet.view.on_snapshot(key, relay.epoch, relay.seq, [], True, fleet.now_s)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("reported", [True, False])
def test_what_is_learned_of_a_worker_follows_it_to_another_slot(
    native: bool, reported: bool
) -> None:
    fleet = Fleet(policy="ttft", index=NativeIndex() if native else None)
    slow = fleet.add("slow", total_blocks=100_000)
    slot = fleet.view.sources[slow].slot
    rates, sets = fleet.core.fleet.rates, fleet.core.fleet.working_sets
    for i in range(6):  # 3 s for 5,000 tokens
        held = fleet.route(prompt(5000, 10_000 * i)).reservation.id
        fleet.turn(3.0)
        fleet.report(held, "prefill_done")
        fleet.report(held, "finished", output_tokens=3)
    done, _ = (fleet.route(prompt(100_000, i << 20)).reservation.id for i in (1, 2))
    rate, size = rates.rate(slow, "m"), len(sets)
    adopt(fleet, slow)
    assert fleet.view.sources[slow].slot != slot
    if reported:  # before anything is decided
        fleet.report(done, "prefill_done")
    new = fleet.add("new")
    assert fleet.view.sources[new].slot == slot
    request = fleet.request(prompt(500, 5 << 20))
    decision = fleet.core.decide(request, fleet.now_s)
    assert decision.rows.prefill is not None
    waits = dict(zip(decision.rows.workers, decision.rows.prefill.wait_s.tolist(), strict=True))
    assert waits[new] == 0
    assert waits[slow] > 10
    assert decision.sources[decision.order[0]].key == new
    fleet.core.route(request, fleet.now_s)
    assert rates.samples(slow) == 6 + reported
    assert rates.rate(slow, "m") == pytest.approx(rate, rel=0.5)
    assert len(sets) >= size
    fleet.core.remove("slow", 0, fleet.now_s)  # takes nothing of the other one's away
    assert rates.table(slot)[3, slot] == 500
    assert sets.table(slot)[slot] > 0
