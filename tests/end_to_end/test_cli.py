"""The command line, as processes: what an operator types, and what comes back."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml
from google.protobuf import json_format

from kvroute.client import KvRouteClient, KvRouteError, RetryPolicy
from router.config.settings.configurations import ModelSettings
from router.config.settings.fleet_settings import FleetSettings
from router.config.settings.serving_settings import DecisionLogSettings
from router.decide.policies import POLICIES
from router.observe.audit.recompute_receipt import check
from tests.stage.certificates import Authority, written
from tests.stage.loopback import Stage, a_stage, router_app, serve_config
from tests.stage.programs import KVROUTE, kvroute, running
from tests.stage.waiting import until


class Server:
    """A `kvroute serve` process and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    def log(self) -> str:
        return self._log.read_text()

    def logged(self, pattern: str) -> str | None:
        found = re.search(pattern, self.log())
        return found[1] if found else None


@asynccontextmanager
async def serving(folder: Path, *arguments: str) -> AsyncIterator[Server]:
    log = folder / "serve.log"
    words = (
        *("--grpc-listen", "127.0.0.1:0", "--grpc-unix-socket", str(folder / "sock")),
        *("--metrics-listen", "", "--log-format", "plain"),
    )
    with log.open("wb") as output:
        async with running(*KVROUTE, "serve", *words, *arguments, stderr=output) as process:
            server = Server(process, log)
            await until(lambda: server.logged(r"gRPC on .*port (\d+)"), "the server to listen")
            yield server


async def test_check_config_prints_what_would_be_used_with_secrets_masked(tmp_path: Path) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text("routing: {lease_s: 5.0}\nnats: {url: 'tls://u:pw@h:1', password: hush}\n")
    code, out, _ = await kvroute(
        "check-config", "--config", str(file), env={"KVROUTE_FLEET_NAME": "east"}
    )
    assert code == 0
    told = yaml.safe_load(out)
    assert told["routing"]["lease_s"] == 5.0
    assert told["fleet"]["name"] == "east"
    assert told["nats"]["url"] == "tls://***@h:1"
    assert "hush" not in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("grpc: {lissen: x}", "unknown key `lissen`, did you mean `listen`? - at `$.grpc`"),
        ("routing: {policy: best}", "unknown policy 'best'"),
        ("workers: [{id: a, engine: vllm, address: x, events: 'ipc://x', ranks: 2}]", "ipc://x"),
        (
            "workers: [{id: a, engine: vllm, address: x, replay: 'tcp://x:1'}]",
            "needs an `events` endpoint",
        ),
        ("workers: [{id: a, engine: vllm, address: x, events: ''}]", "at `$.workers[0].events`"),
        ("nonsense", "expected a mapping"),
        ("nats: {url: 'nats://h:1', credentials_file: /no/such}", "No such file"),
        ("nats: {url: 'http://h:1'}", "is no NATS URL"),
        (
            "nats: {url: 'nats://u:pw@h:1'}",
            "nats: 'nats://h:1' is not loopback, and the connection",
        ),
        ("nats: {url: 'nats://h:99999'}", "its port is no number from 1 to 65535"),
    ],
)
async def test_a_wrong_configuration_ends_with_one_line_that_names_it(
    text: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text(text)
    code, out, err = await kvroute("serve", "--config", str(file))
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.strip().splitlines()) == 1


async def test_an_argument_that_is_no_text_ends_with_one_line() -> None:
    code, out, err = await kvroute("explain", "--model", os.fsdecode(b"\xff"), "--tokens", "1")
    assert (code, out, err) == (2, "", "kvroute: the argument '\\udcff' is not UTF-8\n")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("", "no engine to relay"),
        ("--worker-id a", "give --address too"),
        (
            "--worker-id a --address http://x --replay tcp://127.0.0.1:1",
            "replay: needs an `events` endpoint",
        ),
        ("--worker-id a --address http://x --events tcp://127.0.0.1:1", "--nats URL"),
    ],
)
async def test_a_relay_without_an_engine_or_a_broker_says_what_is_missing(
    words: str, missing: str
) -> None:
    code, _, err = await kvroute("relay", *words.split())
    assert (code, missing in err) == (2, True)


async def test_a_relay_says_at_once_that_it_can_keep_nothing(tmp_path: Path) -> None:
    file = tmp_path / "no folder"
    file.write_text("")
    engine = ("--worker-id", "a", "--address", "http://x", "--events", "tcp://127.0.0.1:1")
    code, _, err = await kvroute(
        "relay", *engine, "--nats", "nats://127.0.0.1:1", "--state-dir", str(file)
    )
    assert code == 2
    assert f"can't write to {file}: File exists - at `$.state_dir`" in err


async def test_sigterm_drains_and_leaves_nothing_running(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        nats_pid = int(server.logged(r"\(pid (\d+)\)") or 0)
        os.kill(nats_pid, 0)
        async with KvRouteClient(f"unix:{tmp_path / 'sock'}") as client:
            watching = asyncio.create_task(anext(aiter(client.watch_workers())))
            await watching
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await server.process.wait() == 0
        assert "draining" in server.log()
        assert "Traceback" not in server.log()
        with pytest.raises(ProcessLookupError):
            os.kill(nats_pid, 0)


async def test_the_embedded_broker_dies_with_a_router_that_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        nats_pid = int(server.logged(r"\(pid (\d+)\)") or 0)
        server.process.kill()
        await server.process.wait()

        def gone() -> bool:
            try:
                state = Path(f"/proc/{nats_pid}/stat").read_text().rsplit(") ")[1][0]
            except FileNotFoundError:
                return True
            return state == "Z"  # left, and not yet collected by whoever adopted it

        await until(gone, "the end of nats-server")


async def test_the_embedded_broker_is_started_again_when_it_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await until(lambda: server.logged(r"(connected to NATS)"), "the first connection")
        os.kill(int(server.logged(r"\(pid (\d+)\)") or 0), signal.SIGKILL)
        await until(lambda: server.logged(r"(connected to NATS again)"), "the broker to be back")


async def test_sighup_changes_the_policy_and_says_what_waits_for_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text("routing: {policy: round-robin}\n")
    async with serving(tmp_path, "--config", str(file)) as server:
        file.write_text("routing: {policy: ttft, lease_s: 7}\n")
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: server.logged(r"(reloaded; changed: routing.policy)"), "the reload")
        assert server.logged(r"(only with a restart: routing.lease_s)")
        file.write_text("routing: {policy: nobody}\n")
        server.process.send_signal(signal.SIGHUP)
        await until(
            lambda: server.logged(r"(not reloaded, .*unknown policy 'nobody')"), "a refusal"
        )
        assert server.process.returncode is None


async def test_sighup_switches_what_watches_on_and_off(tmp_path: Path) -> None:
    file, decisions = tmp_path / "kvroute.yaml", tmp_path / "decisions"
    nothing = tmp_path / "no" / "folder"

    async with serving(
        tmp_path, "--config", str(write(file, "{}")), "--metrics-listen", "127.0.0.1:0"
    ) as server:
        await until(lambda: server.logged(r"metrics on .*port (\d+)"), "metrics")
        metrics, target = (
            f"127.0.0.1:{server.logged(rf'{name} on .*port (.+)[)]')}"
            for name in ("metrics", "gRPC")
        )

        async def reload(text: str, answer: str) -> set[str]:
            """Families of what is on, once the router has said so."""
            before = len(re.findall(answer, server.log()))
            write(file, text)
            server.process.send_signal(signal.SIGHUP)
            await until(lambda: len(re.findall(answer, server.log())) > before, answer)
            async with aiohttp.request("GET", f"http://{metrics}/metrics") as response:
                told = await response.text()
            names = re.findall(r"\nkvroute_(shadow_dec|hot_prefix_copies)", told)
            return {*names, *re.findall(r'\nkvroute_records_total.*what="(\w+)"', told)}

        async def refused_and_logged(lines: int) -> None:
            async with KvRouteClient(target, retry=RetryPolicy(attempts=1)) as client:
                with pytest.raises(KvRouteError, match="NO_WORKER"):
                    await client.route(token_ids=[1, 2, 3])
            await until(lambda: decisions.read_bytes().count(b"\n") == lines, f"{lines} lines")

        on = f"decision_log: {{file: {decisions}, share: 1.0}}"
        shadow = "routing: {shadow_policy: ttft, hot_prefixes: {enabled: true}}"
        all_on = {"shadow_dec", "decision_log", "hot_prefix_copies"}
        assert await reload(on, r"changed: decision_log.file, decision_log.share") == {
            "decision_log"
        }
        await refused_and_logged(1)
        told = r"changed: routing.shadow_policy, routing.hot_prefixes.enabled\n"
        assert await reload(f"{on}\n{shadow}", told) == all_on
        wrong = f"decision_log: {{file: {nothing}}}\nrouting: {{policy: ttft}}"
        assert await reload(wrong, r"not reloaded, .*decision_log\.file") == all_on
        wrong = f"decision_log: {{file: {tmp_path}/never}}\nrouting: {{shadow_policy: nobody}}"
        assert await reload(wrong, r"not reloaded, .*shadow_policy") == all_on
        assert not (tmp_path / "never").exists()
        await refused_and_logged(2)
        assert (
            await reload("{}", r"changed: routing.shadow_policy, .*decision_log.share\n") == set()
        )


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


async def test_a_second_server_on_a_port_fails_loudly(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        port = server.logged(r"gRPC on .*port (\d+)")
        code, _, err = await kvroute(
            "serve", "--grpc-listen", f"127.0.0.1:{port}", "--metrics-listen", ""
        )
        assert code == 2
        assert f"can't listen on 127.0.0.1:{port}" in err
        assert err.index("can't listen") < err.index("draining"), "before the lines of the end"


async def test_a_port_with_tls_that_is_called_without_it_is_named_with_the_remedy(
    tmp_path: Path,
) -> None:
    authority = Authority()
    tls = written(tmp_path, authority.issue())
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    ca = ("--tls-ca", str(tmp_path / "ca.crt"))
    async with router_app(msgspec.structs.replace(serve_config(None), tls=tls)) as (app, _):
        target = ("--target", f"127.0.0.1:{app.listeners.grpc_port}")
        code, _, err = await kvroute("workers", *target)
        assert code == 1
        assert err.endswith("; if this port speaks TLS, give --tls-ca FILE, or --tls\n")
        assert (await kvroute("workers", *target, *ca))[0] == 0
    async with router_app(serve_config(None)) as (app, _):
        target = ("--target", f"127.0.0.1:{app.listeners.grpc_port}")
        code, _, err = await kvroute("workers", *target, *ca)
        assert code == 1
        assert "; if this port speaks no TLS, leave out --tls" in err


async def test_workers_and_explain_show_a_fleet() -> None:
    async with a_stage() as stage:
        target = f"127.0.0.1:{stage.router.listeners.grpc_port}"
        tokens = list(range(100))
        worker = await stage.serve(tokens)
        await until(lambda: stage.known(worker, tokens) == 96, "six blocks in the index")
        code, out, _ = await kvroute("workers", "--target", target)
        assert code == 0
        assert "worker-0/0" in out
        assert "worker-1/0" in out
        assert stage.engines[0].address in out
        code, out, _ = await kvroute("workers", "--target", target, "--json")
        listed = json.loads(out)["workers"]
        assert [one["workerId"] for one in listed] == ["worker-0", "worker-1"]
        await _explained(stage, target, tokens, worker)


async def test_a_running_router_takes_every_command_of_an_operator() -> None:
    model = ModelSettings(name="big", block_size=32)
    loopback = FleetSettings(register_networks="127.0.0.0/8")
    async with a_stage(engine_count=1, models=(model,), fleet=loopback) as stage:
        await stage.relays["worker-0"].stop()
        engine, view = stage.engine("worker-0"), stage.router.view
        target = ("--target", f"127.0.0.1:{stage.router.listeners.grpc_port}")
        described = (
            *("--engine", "vllm", "--address", engine.address, "--events", engine.events_endpoint),
            *("--replay", engine.replay_endpoint, "--topic", engine.topic),
            *("--model", "big", "--model-alias", "large", "--slots", "7", "--label", "zone=a"),
        )
        code, out, err = await kvroute("register", "w", *target, *described)
        assert (code, err) == (0, "")
        assert "worker w is registered; this router runs its relay (1 rank)" in out
        await until(
            lambda: any(one.heartbeat and one.heartbeat.block_size for one in view.ranks("w")),
            "its heartbeat after the first answer of its engine",
        )
        told = {one.worker_id: one for one in await stage.client.list_workers()}["w"]
        assert (told.model, list(told.model_aliases), dict(told.labels)) == (
            "big",
            ["large"],
            {"zone": "a"},
        )
        assert (told.block_size, told.total_slots) == (32, 7), "the model's block size, as said"
        (nobody, _, unknown), (drained, out, _) = await asyncio.gather(
            kvroute("drain", "nobody", *target), kvroute("drain", "w", *target, "--json")
        )
        assert (nobody, len(unknown.splitlines())) == (1, 1)
        assert "UNKNOWN_WORKER: no worker 'nobody' is known here" in unknown
        assert drained == 0
        assert json.loads(out) == {"action": "drain", "worker_id": "w", "ranks": 1}
        assert "w" in stage.router.core.fleet.drained
        (undrained, back, _), (resynced, again, _) = await asyncio.gather(
            kvroute("undrain", "w", *target), kvroute("resync", "w", *target)
        )
        assert (undrained, "worker w is back" in back) == (0, True)
        assert (resynced, "worker w is resynced" in again) == (0, True)
        assert "w" not in stage.router.core.fleet.drained
        code, out, _ = await kvroute("remove", "w", *target, "--tombstone-s", "60")
        assert (code, "worker w is removed" in out) == (0, True)
        assert view.ranks("w") == []
        assert stage.router.relays.ended == {"removed": 1}


async def _explained(stage: Stage, target: str, tokens: list[int], worker: str) -> None:
    asked = ("explain", "--target", target, "--tokens", json.dumps(tokens))
    code, out, _ = await kvroute(*asked)
    assert code == 0
    (picked,) = [line for line in out.splitlines() if line.startswith("->")]
    assert picked.split()[1] == f"{worker}/0"
    assert " 96 " in picked
    code, out, _ = await kvroute(*asked, "--json")
    assert json.loads(out)["workerId"] == worker
    assert len(stage.router.core.reservations) == 0
    text = ("--text", "some words", "--tokenize", stage.engines[0].address)
    code, out, _ = await kvroute("explain", "--target", target, *text)
    assert (code, "10 prompt tokens" in out) == (0, True)
    code, _, err = await kvroute("explain", "--target", target, "--tokens", "1,two")
    assert (code, "expected token ids" in err) == (2, True)
    code, _, err = await kvroute("explain", "--target", target, "--tokens", "1", "-m", "nobody")
    assert (code, "unknown model 'nobody'" in err) == (1, True)


async def test_receipts_of_a_running_router_are_worked_out_anew(tmp_path: Path) -> None:
    async with a_stage(engine_count=3) as stage:
        await stage.serve(list(range(200)))
        for policy in POLICIES:
            pick = await stage.client.route(token_ids=list(range(400)), policy=policy)
            assert check(pick.receipt).complaints == [], policy
        receipt = (await stage.client.route(token_ids=list(range(300)))).receipt
    file = tmp_path / "receipt"
    file.write_bytes(receipt.SerializeToString())
    code, out, err = await kvroute("explain", "--receipt", str(file))
    assert (code, err) == (0, "")
    assert "It holds." in out
    told = json_format.MessageToDict(receipt)
    told["picked"]["cost"] = told["picked"].get("cost", 0.0) + 1.0
    file.write_text(json.dumps({"receipt": told}))
    code, out, _ = await kvroute("explain", "--receipt", str(file))
    assert (code, "does not hold" in out) == (1, True)


async def test_logged_decisions_are_replayed_with_other_policies(tmp_path: Path) -> None:
    file = tmp_path / "decisions"
    settings = DecisionLogSettings(file=str(file), share=1.0)
    async with a_stage(engine_count=3, decision_log=settings) as stage:
        await stage.client.wait_ready()  # before that, no model is unknown
        for i in range(20):
            await stage.client.route(token_ids=list(range(i % 4, 200)))
        with pytest.raises(KvRouteError, match="nobody"):
            await stage.client.route(token_ids=[1, 2, 3], model="nobody")
        told = stage.router.registry.get_sample_value(
            "kvroute_records_total", {"what": "decision_log", "result": "dropped"}
        )
        assert told == 0
    anywhere = "simulator.world.yardsticks:random"
    asked = ("--policy", "dynamo-adaptive", "--policy", anywhere)
    code, out, err = await kvroute("replay-log", str(file), *asked, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["unread_lines"] == 0
    own, other = told["policies"]
    assert own["decided_by"] == {"dynamo-adaptive": 20}
    assert own["agreement"]["same"] + own["agreement"]["tied"] == 20
    assert own["hit_ratio"]["would_be"] == pytest.approx(own["hit_ratio"]["picked"], abs=0.2)
    assert other["agreement"]["tied"] == 20
    assert (other["refusals"]["UNKNOWN_MODEL"], other["refusals_taken"]) == (1, 0)
    lines = len(file.read_bytes().splitlines())
    with file.open("ab") as torn:
        torn.write(b'{"v": 1, "at_s"')
    code, out, err = await kvroute("replay-log", str(file), "--policy", "least-loaded")
    assert (code, f"decisions:{lines + 1}" in err) == (1, True)
    assert "20 by dynamo-adaptive" in out
    assert re.search(r"\d+ refused: .*1 UNKNOWN_MODEL", out)
    code, _, err = await kvroute("replay-log", str(file), "--policy", "session-sticky")
    assert (code, "needs hashes" in err) == (1, True)


async def test_what_is_no_receipt_is_said_to_be_none(tmp_path: Path) -> None:
    file = tmp_path / "receipt"
    file.write_text("nothing")
    code, _, err = await kvroute("explain", "--receipt", str(file))
    assert (code, "neither JSON nor the bytes of a receipt" in err) == (1, True)


async def test_policies_lists_all_with_formula_and_parameters() -> None:
    code, out, _ = await kvroute("policies", "--json")
    assert code == 0
    listed = {one["name"]: one for one in json.loads(out)}
    assert listed["dynamo-unguarded"]["parameters"]["alpha_balance"] == 0.7
    assert {"dynamo-logit", "least-loaded", "round-robin"} < listed.keys()
    assert listed["dynamo-blocks"]["about"]["host_credit"].endswith("at least 0")
    code, out, _ = await kvroute("policies")
    assert "conductor\n    where the cache is" in out
    assert "      hit_ratio_min = 0.1    (" in out


async def test_the_demo_writes_what_its_table_shows(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    code, out, err = await kvroute(
        "demo", "--speed", "20", "--policy", "dynamo-adaptive", "--json", str(file)
    )
    assert code == 0, err
    (run,) = json.loads(file.read_text())["runs"]
    assert run["policy"] == "dynamo-adaptive"
    assert (run["requests"], run["failed"]) == (350, 0)
    assert 0 < run["block_hit_rate"] < run["ceiling"] < 1
    assert run["ttft_ms"]["mean"] > 0
    assert run["decision_us"]["p99"] >= run["decision_us"]["p50"] > 0
    assert f"{run['block_hit_rate']:.1%}" in out
