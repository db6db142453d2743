"""The fleet service over a real socket: workers listed, watched, drained, removed, registered."""

import asyncio
from math import inf, nan
from typing import Any

import grpc
import grpc.aio
import pytest

from events.plane.facts import VERSION, Control
from indexer.identity import Tier
from kvroute.v1 import fleet_pb2
from router.api.service import worker_feed
from router.api.service.grpc_bounds import GrpcBounds
from router.config.settings.configurations import ModelSettings
from router.config.settings.fleet_settings import TOMBSTONE_MAX_S
from tests.router.api.service.setting import Code
from tests.stage.fleet import prompt
from tests.stage.served import Served, refusal, served


class TestFleet:
    async def test_workers_are_listed_by_id_and_rank_with_all_that_is_known(
        self, empty: Served
    ) -> None:
        fleet = empty.fleet
        key = fleet.add(
            "b",
            1,
            model="alpha",
            model_aliases=("a",),
            lora_names=("ad",),
            labels={"zone": "north"},
            engine_version="0.32.0",
            engine_block_size=4,
            max_model_len=4096,
            warnings=("an odd thing",),
        )
        fleet.add("b", 0, model="beta", total_blocks=0, total_slots=None)
        fleet.add("a")
        fleet.cache(key, prompt(64), 48)
        fleet.cache(key, prompt(64), 32, Tier.HOST)
        fleet.say(key, running=2, waiting=1, used_blocks=9.0)
        await empty.route(20, model="alpha")
        fleet.now_s += 0.5
        listed = (await empty.call("ListWorkers")).workers
        assert [(one.worker_id, one.dp_rank) for one in listed] == [("a", 0), ("b", 0), ("b", 1)]
        _, unknown, told = listed
        assert not unknown.HasField("total_blocks"), "0 is not told"
        assert not unknown.HasField("total_slots")
        assert (told.model, told.model_aliases, told.lora_names) == ("alpha", ["a"], ["ad"])
        assert (told.engine, told.engine_version) == ("vllm", "0.32.0")
        assert (told.block_size, told.engine_block_size) == (16, 4)
        assert told.max_model_len == 4096
        assert told.labels == {"zone": "north"}
        assert (told.schedulable, told.unschedulable_reason) == (True, "")
        assert (told.stream_state, told.stream_complete) == ("live", True)
        assert (told.blocks_device, told.blocks_host, told.blocks_disk) == (3, 2, 0)
        assert (told.running, told.waiting, told.reserved) == (2, 1, 1)
        assert told.active_blocks == 9 + 2
        assert (told.total_blocks, told.total_slots) == (1000, 100)
        assert told.prefill_tokens_active == 20 - 16
        assert (told.prefill_rate, told.prefills_measured) == (20_000, 0)
        assert told.beat_age_s == told.sample_age_s == 0.5
        assert told.warnings == ["an odd thing"]
        assert told.stream_changed_at.ToSeconds() == int(fleet.now_s)

    async def test_a_list_may_be_of_one_model_by_any_of_its_names(self) -> None:
        models = (ModelSettings(name="alpha", aliases=("configured",)),)
        async with served(models=models) as stage:
            stage.fleet.add("a", model="alpha", model_aliases=("told",))
            stage.fleet.add("b", model="beta", lora_names=("ad",))
            for name, expected in [
                ("alpha", ["a"]),
                ("told", ["a"]),
                ("configured", ["a"]),
                ("ad", ["b"]),
                ("none", []),
                ("", ["a", "b"]),
            ]:
                listed = (await stage.call("ListWorkers", model=name)).workers
                assert [one.worker_id for one in listed] == expected, name

    async def test_watching_tells_all_first_and_then_what_changed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_feed, "WATCH_S", 0.01)
        async with served() as stage, asyncio.timeout(60):
            fleet = stage.fleet
            fleet.add("a")
            fleet.add("b")
            watch = stage.call("WatchWorkers")

            async def changes() -> tuple[list[str], list[str]]:
                told = await watch.read()
                return (
                    [one.worker_id for one in told.changed],
                    [one.worker_id for one in told.removed],
                )

            assert await changes() == (["a", "b"], [])
            fleet.now_s += 0.5  # ages alone are no change
            fleet.add("c")
            assert await changes() == (["c"], [])
            fleet.core.drain("b")
            assert await changes() == (["b"], [])
            fleet.core.remove("a", 60.0, fleet.now_s)
            assert await changes() == ([], ["a"])
            stage.stopping.set()
            assert await watch.read() is grpc.aio.EOF

    async def test_statuses_are_written_once_for_all_who_watch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_feed, "WATCH_S", 0.01)
        async with served(watches_max=5) as stage, asyncio.timeout(60):
            for i in range(100):
                stage.fleet.add(f"w{i:02}", model="m" if i < 60 else "n")
            feed, request = stage.watched, fleet_pb2.WatchWorkersRequest
            calls = [stage.workers.WatchWorkers(request(model=m)) for m in ("", "", "", "m", "n")]
            first = [await call.read() for call in calls]
            assert [len(one.changed) for one in first] == [100, 100, 100, 60, 40]
            assert [one.worker_id for one in first[0].changed] == sorted(
                f"w{i:02}" for i in range(100)
            )
            assert feed.watches == 5
            refused = await refusal(stage.workers.WatchWorkers(request()).read())
            assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
            assert refused.retry_s
            stage.fleet.core.drain("w07")
            stage.fleet.core.remove("w70", 3600.0, stage.fleet.now_s)
            for call in calls:
                changed: list[str] = []
                removed: list[str] = []
                while call is not calls[4] and "w07" not in changed:
                    told = await call.read()
                    changed += [one.worker_id for one in told.changed]
                    removed += [one.worker_id for one in told.removed]
                while call is not calls[3] and "w70" not in removed:
                    removed += [one.worker_id for one in (await call.read()).removed]
            rounds = feed._numbers
            assert feed.statuses_written <= 100 * rounds, "however many watch"
            for call in calls:
                call.cancel()
            writer = feed._writer
            assert writer is not None
            await writer
            assert feed.watches == 0
            before = feed.statuses_written
            await stage.call("GetIndexStats")
            assert feed.statuses_written == before, "nobody watches"
            listed = await stage.call("ListWorkers", model="n")
            assert len(listed.workers) == 39

    async def test_a_watcher_that_comes_later_sees_the_round_that_is_there(self) -> None:
        async with served("w0") as stage, asyncio.timeout(60):
            calls = [stage.call("WatchWorkers") for _ in range(3)]
            told = [await call.read() for call in calls]
            assert [len(one.changed) for one in told] == [1, 1, 1]
            assert stage.watched.statuses_written == stage.watched._numbers
            for call in calls:
                call.cancel()

    async def test_watching_an_empty_fleet_says_so_at_once(self) -> None:
        async with served() as stage, asyncio.timeout(60):
            watch = stage.call("WatchWorkers", model="m")
            told = await watch.read()
            assert (list(told.changed), list(told.removed)) == ([], [])
            watch.cancel()

    async def test_watching_ends_at_once_with_a_drain(self) -> None:
        async with served() as stage, asyncio.timeout(60):
            watch = stage.call("WatchWorkers")
            await watch.read()
            stage.stopping.set()
            await stage.server.drain(60)

    async def test_draining_reaches_all_ranks_here_and_every_replica(self) -> None:
        async with served(replica="r1") as stage:
            for rank in range(2):
                stage.fleet.add("w0", rank)
            request = fleet_pb2.DrainWorkerRequest(worker_id="w0")
            assert (await stage.workers.DrainWorker(request)).ranks == 2
            assert (await refusal(stage.route())).reason == "NO_ELIGIBLE_WORKER"
            request.undrain = True
            assert (await stage.workers.DrainWorker(request)).ranks == 2
            await stage.route()
            assert [(one.action, one.worker_id) for one in stage.sent] == [
                ("drain", "w0"),
                ("undrain", "w0"),
            ]
            assert len({one.id for one in stage.sent}) == 2
            assert all(one.id.startswith("r1-") for one in stage.sent)

    async def test_a_drained_worker_that_is_away_can_be_undrained(self, empty: Served) -> None:
        empty.fleet.core.drain("away")
        assert (await empty.call("DrainWorker", worker_id="away", undrain=True)).ranks == 0
        assert empty.fleet.core.fleet.drained == {}

    async def test_removing_ends_what_is_reserved_there(self, stage: Served) -> None:
        await stage.route()
        assert (await stage.call("RemoveWorker", worker_id="w0", tombstone_s=5)).ranks == 1
        assert stage.fleet.loads() == {}
        assert stage.fleet.core.endings == {"worker_lost": 1}
        (control,) = stage.sent
        assert (control.action, control.tombstone_s) == ("remove", 5)

    @pytest.mark.parametrize("seconds", [-1.0, nan, inf, TOMBSTONE_MAX_S + 1, 1e300])
    async def test_a_tombstone_that_is_no_time_is_refused(
        self, seconds: float, empty: Served
    ) -> None:
        key = empty.fleet.add("w0")
        refused = await refusal(empty.call("RemoveWorker", worker_id="w0", tombstone_s=seconds))
        assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert refused.metadata == {"field": "tombstone_s"}
        assert key in empty.fleet.view.sources
        assert empty.sent == []

    async def test_a_removal_for_the_longest_time_is_taken_back_by_undrain(
        self, stage: Served
    ) -> None:
        await stage.call("RemoveWorker", worker_id="w0", tombstone_s=TOMBSTONE_MAX_S)
        stage.fleet.add("w0")
        assert stage.fleet.view.ranks("w0") == []
        await stage.call("DrainWorker", worker_id="w0", undrain=True)
        stage.fleet.add("w0")
        assert len(stage.fleet.view.ranks("w0")) == 1

    async def test_a_removal_is_taken_back_by_registering_the_worker(self, stage: Served) -> None:
        await stage.call("RemoveWorker", worker_id="w0")
        engine = {"worker_id": "w0", "engine": "vllm", "address": "http://w0:1"}
        await stage.call("RegisterWorker", **engine)
        assert [one.action for one in stage.sent] == ["remove", "undrain"]
        stage.fleet.add("w0")
        assert len(stage.fleet.view.ranks("w0")) == 1

    async def test_a_command_wins_over_one_of_a_replica_whose_clock_is_ahead(
        self, stage: Served
    ) -> None:
        stage.commands.apply(Control(VERSION, "r2-1", "drain", "w0", 0.0, stage.fleet.now_s + 3600))
        assert (await stage.call("DrainWorker", worker_id="w0", undrain=True)).ranks == 1
        assert stage.fleet.core.fleet.drained == {}

    async def test_a_command_that_another_overtakes_under_way_is_aborted(
        self, stage: Served
    ) -> None:
        newer = Control(VERSION, "r2-1", "undrain", "w0", 0.0, stage.fleet.now_s + 1)
        stage.on_sent = lambda: stage.commands.apply(newer)
        refused = await refusal(stage.call("DrainWorker", worker_id="w0"))
        assert (refused.code, refused.reason) == (Code.ABORTED, "OVERTAKEN")
        assert stage.fleet.core.fleet.drained == {}

    async def test_resync_asks_the_relay_again(self) -> None:
        resynced: list[str] = []
        async with served("w0", on_resync=resynced.append) as stage:
            assert (await stage.call("ResyncWorker", worker_id="w0")).ranks == 1
            assert resynced == ["w0"]

    @pytest.mark.parametrize("method", ["DrainWorker", "RemoveWorker", "ResyncWorker"])
    async def test_commands_on_a_worker_that_nobody_knows_are_refused(
        self, method: str, empty: Served
    ) -> None:
        request = getattr(fleet_pb2, f"{method}Request")(worker_id="none")
        refused = await refusal(getattr(empty.workers, method)(request))
        assert (refused.code, refused.reason) == (Code.NOT_FOUND, "UNKNOWN_WORKER")
        assert "'none'" in refused.message
        assert empty.sent == []

    async def test_a_watch_ends_with_its_age_for_the_client_to_begin_anew(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_feed, "WATCH_S", 0.01)
        async with served(bounds=GrpcBounds(age_grace_s=0.05)) as stage, asyncio.timeout(60):
            watch = stage.call("WatchWorkers")
            assert [len(message.changed) async for message in watch] == [0]
            assert await watch.code() is Code.OK

    async def test_a_command_that_others_cannot_hear_says_so_and_has_its_effect_here(
        self, stage: Served
    ) -> None:
        stage.broker_is_there = False
        refused = await refusal(stage.call("DrainWorker", worker_id="w0"))
        assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "NO_BROKER")
        assert "took effect here" in refused.message
        assert list(stage.fleet.core.fleet.drained) == ["w0"]

    async def test_an_engine_without_a_relay_can_be_registered(self, empty: Served) -> None:
        await empty.call(
            "RegisterWorker",
            worker_id="w0",
            engine="vllm",
            address="http://w0:8000",
            events="tcp://w0:5557",
            labels={"zone": "north"},
        )
        (settings,) = empty.registered
        assert (settings.id, settings.engine) == ("w0", "vllm")
        assert (settings.replay, settings.metrics) == (None, None)
        assert settings.labels == {"zone": "north"}

    async def test_routers_may_warm_a_registered_engine_only_where_it_says_so(
        self, empty: Served
    ) -> None:
        request = fleet_pb2.RegisterWorkerRequest(
            worker_id="w", engine="vllm", address="http://w:8000", role="prefill"
        )
        for warm in (False, True):
            request.warm = warm
            await empty.workers.RegisterWorker(request)
        assert [one.warm for one in empty.registered] == [False, True]
        assert [one.role for one in empty.registered] == ["prefill", "prefill"]
        request.address = "grpc://w:8000"
        refused = await refusal(empty.workers.RegisterWorker(request))
        assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert refused.message.startswith("warm: the engine has no HTTP base ")
        assert refused.metadata == {"field": "warm"}

    async def test_an_engine_that_publishes_no_events_can_be_registered_too(
        self, empty: Served
    ) -> None:
        request = fleet_pb2.RegisterWorkerRequest(worker_id="w", engine="vllm", address="http://a")
        await empty.workers.RegisterWorker(request)
        assert empty.registered[0].events is None
        request.replay = "tcp://w:2"
        refused = await refusal(empty.workers.RegisterWorker(request))
        assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert refused.message.startswith("replay: needs an `events` endpoint")
        assert refused.metadata == {"field": "replay"}

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ({"engine": "other"}, "engine"),
            ({"worker_id": ""}, "worker_id"),
            ({"worker_id": "w" * 257}, "worker_id"),
            ({"address": ""}, "address"),
            ({"address": "h" * 4097}, "address"),
            ({"address": "10.0.0.1:8000"}, "address"),
            ({"address": "http://a..b"}, "address"),
            ({"events": "nonsense"}, "events"),
            ({"events": "tcp://host"}, "events"),
            ({"events": "tcp://host:0"}, "events"),
            ({"events": "tcp://host:65536"}, "events"),
            ({"events": "ipc://" + 200 * "p"}, "events"),
            ({"replay": "tcp://host"}, "replay"),
            ({"replay": "udp://host:1"}, "replay"),
            ({"metrics": "http://a..b"}, "metrics"),
            ({"metrics": f"http://{'l' * 64}.example"}, "metrics"),
            ({"metrics": "http://[::1"}, "metrics"),
            ({"metrics": "http://h:x"}, "metrics"),
            ({"metrics": "ftp://h"}, "metrics"),
            ({"role": "judge"}, "role"),
            ({"labels": {f"l{i}": "" for i in range(257)}}, "labels"),
            ({"labels": {"l": "v" * 1025}}, "labels"),
            ({"events": "", "topic": "t"}, "topic"),
            ({"events": "", "events_bind": True}, "events_bind"),
            ({"load": "nonsense"}, "load"),
            ({"ranks": 0}, "ranks"),
            ({"ranks": 1025}, "ranks"),
            ({"ranks": 2, "events": "ipc://x"}, "events"),
            ({"model": "m" * 1025}, "model"),
            ({"model_aliases": ["m" * 1025]}, "model_aliases"),
            ({"model_aliases": ["m"] * 257}, "model_aliases"),
            ({"block_size": 0}, "block_size"),
            ({"block_size": 65537}, "block_size"),
            ({"kv_connector": "c" * 1025}, "kv_connector"),
            ({"kv_engine_id": "c" * 1025}, "kv_engine_id"),
            ({"bootstrap_host": "c" * 1025}, "bootstrap_host"),
            ({"bootstrap_port": 0}, "bootstrap_port"),
            ({"bootstrap_port": 65536}, "bootstrap_port"),
            ({"slots": 0}, "slots"),
            ({"slots": 1 << 31}, "slots"),
        ],
    )
    async def test_an_engine_that_is_none_is_refused(
        self, wrong: dict[str, Any], told: str, empty: Served
    ) -> None:
        good: dict[str, Any] = {
            "worker_id": "w",
            "engine": "vllm",
            "address": "http://a",
            "events": "tcp://w:1",
        }
        refused = await refusal(empty.call("RegisterWorker", **good | wrong))
        assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert refused.message.startswith(f"{told}: ")
        assert refused.metadata == {"field": told}
        assert empty.registered == []

    async def test_index_stats(self, empty: Served) -> None:
        for name in "ab":
            empty.fleet.cache(empty.fleet.add(name), prompt(64))
        stats = await empty.call("GetIndexStats")
        assert (stats.blocks, stats.placements, stats.workers) == (4, 8, 2)
        assert stats.facts_applied == 2
        assert stats.bytes > 0
