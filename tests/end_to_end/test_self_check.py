"""What an index that is wrong, or an engine that is set up wrong, looks like from outside."""

import asyncio
import logging
from math import inf

import pytest

from events.feed.stream import StreamState
from kvroute.client import NoWorker, UnknownModel
from router.app.processes import router_clock as app
from tests.stage.loopback import BLOCK_SIZE, a_stage, router_app, serve_config
from tests.stage.waiting import DEADLINE_S, until


async def test_predictions_that_keep_failing_have_the_stream_read_anew() -> None:
    async with a_stage(engine_count=1) as stage:
        tokens = list(range(10 * BLOCK_SIZE + 3))
        worker = await stage.serve(tokens)
        await until(lambda: stage.known(worker, tokens) == 10 * BLOCK_SIZE, "blocks in the index")
        view, check = stage.router.view, stage.router.core.fleet.self_check
        (source,) = view.sources.values()
        read_before = view.recoveries["snapshot", "ok"]
        async with asyncio.timeout(DEADLINE_S):
            while not check.resyncs:  # three, where no late beat makes the stream suspect meanwhile
                pick = await stage.client.route(token_ids=tokens)
                await stage.finish(pick, cached_tokens=0)
        await until(lambda: view.recoveries["snapshot", "ok"] > read_before, "a snapshot")
        await until(lambda: source.stream.state is StreamState.LIVE, "a live stream")
        assert stage.known(worker, tokens) == 10 * BLOCK_SIZE, "the relay says the same again"
        assert check.results["over"] >= 3


async def test_a_warning_is_told_in_the_log_the_list_and_the_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "WARN_S", 0.0)
    caplog.set_level(logging.WARNING, "kvroute")
    async with a_stage(engine_count=1) as stage:
        relay = stage.relays["worker-0"]
        ((_, rank),) = relay.ranks
        rank.counts["unknown_medium"] += 1
        sentence = "the engine's events name a medium that kvroute doesn't know"

        async def told() -> list[str]:
            (worker,) = await stage.client.list_workers()
            return list(worker.warnings)

        await until(lambda: sentence in caplog.text, "a line in the log")
        assert f"worker worker-0/0: {sentence} (relay)" in caplog.text
        assert await told() == [sentence]
        metric = stage.router.registry.get_sample_value(
            "kvroute_worker_warnings", {"worker": "worker-0", "rank": "0", "code": "relay"}
        )
        assert metric == 1
        del rank.counts["unknown_medium"]
        (source,) = stage.router.view.sources.values()
        await until(
            lambda: source.heartbeat is not None and not source.heartbeat.warnings,
            "a heartbeat without a warning",
        )
        assert await told() == []
        assert caplog.text.count(sentence) == 1


async def test_no_model_is_unknown_before_the_router_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_stage(engine_count=1) as stage:
        monkeypatch.setattr(app, "HELLO_GRACE_S", inf)
        config = serve_config(stage.nats.url)
        async with router_app(config, stage.clock) as (young, client):
            assert not young.ready
            with pytest.raises(NoWorker):
                await client.route(token_ids=[1, 2, 3], model="nobody's")
            monkeypatch.setattr(app, "HELLO_GRACE_S", 0.0)
            await until(lambda: young.ready, "readiness")
            with pytest.raises(UnknownModel):
                await client.route(token_ids=[1, 2, 3], model="nobody's")
