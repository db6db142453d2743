"""The whole way over real sockets: ZMQ, NATS, gRPC."""

import random

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from events.feed.stream import StreamState
from kvroute.v1 import FailureReason, Progress, ProgressState
from tests.stage.loopback import BLOCK_SIZE, a_stage, engine_settings, router_app, serve_config
from tests.stage.waiting import until


def prompt(seed: int, tokens: int = 10 * BLOCK_SIZE + 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(tokens)]


async def test_a_prompt_returns_to_the_worker_that_holds_it_and_the_prediction_is_exact() -> None:
    async with a_stage(engine_count=3) as stage:
        for seed in range(4):
            tokens = prompt(seed)
            first = await stage.serve(tokens)
            held = stage.engine(first).engine.cached_tokens(tokens)
            assert held == 10 * BLOCK_SIZE
            await until(
                lambda worker=first, ids=tokens, all_of=held: stage.known(worker, ids) == all_of,
                "the stored blocks in the index",
            )
            longer = [*tokens, *prompt(seed + 100, 40)]
            await stage.idle()
            pick = await stage.client.route(token_ids=longer)
            assert pick.worker_id == first, pick.receipt
            assert pick.overlap_tokens.usable == stage.engine(first).engine.cached_tokens(longer)
            assert pick.receipt.picked.worker_id == first
            await stage.finish(pick)


async def test_evicted_blocks_leave_the_index_and_it_stays_equal_to_the_cache() -> None:
    async with a_stage(engine_count=1, block_count=24) as stage:
        prompts = [prompt(seed) for seed in range(8)]
        for tokens in prompts:
            await stage.serve(tokens)
        relay = stage.relays["worker-0"]
        ((_, rank),) = relay.ranks

        def settled() -> bool:
            (source,) = stage.router.view.sources.values()
            index = stage.router.view.index
            return (
                rank.counts["BlocksRemoved"] > 0
                and source.stream.seq == rank.outbox.seq
                and index.digest(source.slot) == rank.ledger.digest()
            )

        await until(settled, "the index in step with the ledger")
        engine = stage.engine("worker-0").engine
        for tokens in prompts:
            pick = await stage.client.explain(token_ids=tokens)
            (row,) = pick.candidates
            assert row.overlap_tokens.usable == engine.cached_tokens(tokens)


async def test_a_worker_whose_beats_stop_is_never_picked_again_once_its_time_is_up() -> None:
    async with a_stage(engine_count=2) as stage:
        await stage.relays["worker-0"].stop()
        alive = stage.router.view.ranks("worker-1")[0]
        for _ in range(4):  # second by second, so that the living one beats in between
            stage.clock.ahead_s += 1.0
            turned_at_s = stage.clock()
            await until(
                lambda since=turned_at_s: alive.stream.last_beat_s >= since,
                "a beat of the worker that lives",
            )
        for seed in range(50):
            pick = await stage.client.route(token_ids=prompt(seed, 20))
            assert pick.worker_id == "worker-1"
        (dead, _) = await stage.client.list_workers()
        assert (dead.worker_id, dead.schedulable) == ("worker-0", False)
        assert dead.unschedulable_reason == "silent"
        stage.clock.ahead_s += 27.0
        await until(lambda: len(stage.router.view.sources) == 1, "the dead one to be forgotten")
        assert [worker.worker_id for worker in await stage.client.list_workers()] == ["worker-1"]


async def test_a_worker_that_refused_gets_nothing_until_it_is_probed() -> None:
    async with a_stage(engine_count=2) as stage:
        pick = await stage.client.route(token_ids=prompt(1))
        refused = Progress(
            reservation_id=pick.reservation_id,
            state=ProgressState.PROGRESS_STATE_FAILED,
            failure_reason=FailureReason.FAILURE_REASON_WORKER,
            refused=True,
        )
        await stage.client.report(refused)
        other = {"worker-0": "worker-1", "worker-1": "worker-0"}[pick.worker_id]
        for _ in range(20):
            assert (await stage.client.route(token_ids=prompt(1))).worker_id == other
        outliers = stage.router.core.fleet.outliers
        assert list(outliers.verdicts(stage.clock()))
        # Its relay goes on to see the engine answer, so it is probed.
        await until(lambda: outliers.probing, "a probe to be due")
        probe = await stage.client.route(token_ids=prompt(2), allowed_worker_ids=[pick.worker_id])
        await stage.finish(probe)
        (worker,) = [w for w in await stage.client.list_workers() if w.worker_id == pick.worker_id]
        assert (worker.schedulable, worker.ejection.probing) == (True, True)
        assert dict(worker.outcomes) == {"failed_refused": 1, "finished": 1}


async def test_a_router_younger_than_its_fleet_learns_it_from_the_relays_alone() -> None:
    async with a_stage(engine_count=2) as stage:
        prompts = [prompt(seed) for seed in range(6)]
        served_by = [await stage.serve(tokens) for tokens in prompts]
        await until(
            lambda: all(stage.held(worker) for worker in set(served_by)), "the older one to know"
        )
        async with router_app(serve_config(stage.nats.url)) as (young, client):
            await until(lambda: young.ready, "the younger router to be ready")
            await client.wait_ready(5.0)
            for tokens in prompts:
                explained = await client.explain(token_ids=tokens)
                for row in explained.candidates:
                    engine = stage.engine(row.worker_id).engine
                    assert row.overlap_tokens.usable == engine.cached_tokens(tokens)
                    assert row.stream_state == StreamState.LIVE
                    assert row.stream_complete


async def test_a_broker_that_dies_makes_streams_suspect_and_routing_goes_on_by_load() -> None:
    async with a_stage(engine_count=2) as stage:
        tokens = prompt(1)
        worker = await stage.serve(tokens)
        await until(lambda: stage.held(worker) > 0, "blocks in the index")
        url = stage.nats.url
        await stage.nats.stop()
        streams = [source.stream for source in stage.router.view.sources.values()]
        await until(
            lambda: all(one.state is StreamState.SUSPECT for one in streams), "suspect streams"
        )
        stage.clock.ahead_s += 300.0
        explained = await stage.client.explain(token_ids=tokens)
        rows = {row.worker_id: row for row in explained.candidates}
        assert rows[worker].overlap_tokens.usable > 0, "what is known is told"
        assert rows[worker].trust == 0.0, "but not trusted"
        assert (await stage.client.route(token_ids=tokens)).worker_id in rows
        assert len(await stage.client.list_workers()) == 2
        # While nobody listened the engine went on.
        other = prompt(2)
        await stage.engine(worker).engine.complete(other, 1)
        again = type(stage.nats)()
        try:
            await again.start(int(url.rpartition(":")[2]))
            await until(
                lambda: all(one.state is StreamState.LIVE for one in streams), "live streams"
            )
            explained = await stage.client.explain(token_ids=other)
            overlaps = {row.worker_id: row.overlap_tokens.usable for row in explained.candidates}
            assert overlaps[worker] == stage.engine(worker).engine.cached_tokens(other) > 0
        finally:
            await stage.client.close()
            await stage.router.stop()
            for relay in stage.relays.values():
                await relay.stop()
            await again.stop()


async def test_a_cleared_cache_is_forgotten_with_the_engines_next_step() -> None:
    async with a_stage(engine_count=1) as stage:
        await stage.serve(prompt(1))
        await until(lambda: stage.held("worker-0") == 10, "ten blocks in the index")
        engine = stage.engine("worker-0").engine
        engine.reset_prefix_cache()
        await stage.serve(prompt(2, 3 * BLOCK_SIZE + 1))
        await until(lambda: stage.held("worker-0") == 3, "only the new prompt's blocks")


async def test_a_small_fleet_needs_one_process_with_its_workers_in_the_configuration() -> None:
    async with a_stage(engine_count=2) as stage:
        workers = tuple(engine_settings(engine) for engine in stage.engines)
        async with router_app(serve_config(None, workers=workers)) as (app, client):
            await until(lambda: app.ready, "readiness")
            streams = [source.stream for source in app.view.sources.values()]
            assert len(streams) == 2, "ready means that all configured workers are heard"
            await until(lambda: all(one.complete for one in streams), "complete streams")
            listed = await client.list_workers()
            assert [one.worker_id for one in listed] == ["worker-0", "worker-1"]
            assert all(one.schedulable and one.stream_complete for one in listed)
            assert {one.model for one in listed} == {"stand-in"}
            assert {one.block_size for one in listed} == {BLOCK_SIZE}


async def test_metrics_tell_of_picks_workers_streams_and_relays() -> None:
    async with a_stage(engine_count=2) as stage:
        worker = await stage.serve(prompt(1))
        await until(lambda: stage.held(worker) == 10, "ten blocks in the index")
        await stage.serve(prompt(1))
        url = f"http://127.0.0.1:{stage.router.listeners.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200
            text = await response.text()
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["kvroute_requests_total", (("outcome", "picked"), ("reason", ""))] == 2
        assert (
            sum(
                value for (name, _), value in samples.items() if name == "kvroute_prompt_tokens_sum"
            )
            == 2 * 163
        )
        overlap = {
            dict(labels)["tier"]: value
            for (name, labels), value in samples.items()
            if name == "kvroute_overlap_tokens_total" and ("role", "both") in labels
        }
        assert overlap["device"] == 160
        assert samples["kvroute_cached_tokens_total", (("kind", "reported"),)] == 160
        assert samples["kvroute_index_blocks", (("kind", "prefixes"),)] == 10
        labels = ("rank", "0"), ("role", "both")
        live = (*labels, ("state", "live"), ("worker", worker))
        assert samples["kvroute_stream_state", live] == 1
        assert samples["kvroute_worker_up", (*labels, ("worker", worker))] == 1
