"""`kvroute replay`, `capacity` and `simulate` as an operator types them."""

import asyncio
import csv
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from router.app.main import cli
from simulator.engines.profile import profile_names
from simulator.live.run import warn_of_strangers

FORMS = Path(__file__).parents[1] / "data" / "traces"


def kvroute(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def replayed(*words: object) -> list[dict[str, Any]]:
    """The numbers of a replay's runs."""
    done = kvroute("replay", *words, "--quiet", "--json", "-")
    assert done.exit_code == 0, done.output
    runs: list[dict[str, Any]] = json.loads(done.output)["runs"]
    return runs


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 requests, two a second: ten conversations that come back, each with a text of its own."""
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    lines = [
        {
            "timestamp": 500 * i,
            "input_length": 512 * 4 + 100,
            "output_length": 20,
            "hash_ids": [10 * (i % 10) + place for place in range(4)] + [1000 + i],
        }
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("command", ["replay", "capacity", "simulate"])
def test_help_names_every_option_with_its_default(command: str) -> None:
    shown = kvroute(command, "--help")
    assert shown.exit_code == 0
    for text in ("--engine [vllm|sglang|chitu|chitu-skew|chitu-dp]", "[default: 64;", "Tokens"):
        assert text in " ".join(shown.output.split())
    for profile in profile_names():
        assert profile in "".join(shown.output.split())  # which may be broken at a hyphen


@pytest.mark.long
def test_replay_compares_policies_and_writes_what_it_found(trace: Path, tmp_path: Path) -> None:
    json_file, csv_file, page = tmp_path / "a.json", tmp_path / "a.csv", tmp_path / "a.html"
    done = kvroute(
        *("replay", trace, "--workers", 4, "--rate", "1,2", "--policy", "round-robin"),
        *("--compare", "dynamo-adaptive, least-loaded", "--slo-ttft-ms", 400),
        *("--warm-up-requests", 10, "--json", json_file, "--csv", csv_file, "--html", page),
    )
    assert done.exit_code == 0, done.output
    for text in ("small: 60 requests", "small at 2x, 4 workers (vllm)", "ceiling", "TTFT <= 400"):
        assert text in done.output
    one, two = json.loads(json_file.read_text())
    assert (one["trace"], one["workers"], one["engine"]) == ("small", 4, "vllm")
    assert (one["rate"], two["rate"]) == (1.0, 2.0)
    # every request after the first ten finds its 4 x 512 tokens: 32 of 33 blocks
    assert one["ceiling"] == two["ceiling"] == 32 / 33
    runs = {run["policy"]: run for run in one["runs"]}
    assert list(runs) == ["round-robin", "dynamo-adaptive", "least-loaded"]
    for run in runs.values():
        assert (run["requests"], run["failed"], run["shed"]) == (50, 0, 0)
        assert run["block_hit_rate"] <= one["ceiling"]
    assert runs["dynamo-adaptive"]["block_hit_rate"] == one["ceiling"]
    assert runs["dynamo-adaptive"]["ttft_ms"]["mean"] < runs["round-robin"]["ttft_ms"]["mean"]
    rows = list(csv.DictReader(csv_file.read_text().splitlines()))
    assert [row["policy"] for row in rows] == [*runs, *runs]
    html = page.read_text()
    for text in ("All rates", "small at 1x", "small at 2x", *runs):
        assert text in html


def test_replay_plays_orders_with_bands_tenants_and_goodput(trace: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "a.json"
    done = kvroute(
        *("replay", trace, "--workers", 1, "--rate", 10, "--order", "priority,fcfs"),
        *("--engine-option", "max_num_seqs=2", "--queue", "tenants.fair=true"),
        *("--queue", "bands=[{name: low, from_priority: 0}, {name: high, from_priority: 10}]"),
        *("--priority-of", "random:0,10:0.3", "--tenants", 3, "--slo-ttft-ms", 1500),
        *("--json", json_file),
    )
    assert done.exit_code == 0, done.output
    told = json.loads(json_file.read_text())
    assert [run["order"] for run in told["runs"]] == ["priority", "fcfs"]
    for run in told["runs"]:
        assert run["queued"] > 0
        assert 0 < run["goodput_share"] < 1
        assert run["wait_ms"]["p99"] > run["wait_ms"]["p50"]
    assert "of all requests" in done.output


def test_json_alone_goes_to_stdout(trace: Path) -> None:
    words = ("--until", 5, "--quiet", "--json", "-")
    [run] = json.loads(kvroute("replay", trace, *words).output)["runs"]
    assert run["requests"] == 10
    told = json.loads(kvroute("capacity", trace, "--ttft-ms", 500, *words).output)
    assert told["workers"] == 1


def test_the_same_seed_gives_the_same_numbers_and_several_are_averaged(trace: Path) -> None:
    def numbers(*words: object) -> dict[str, Any]:
        [run] = replayed(trace, "--policy", "simulator.world.yardsticks:random", *words)
        return {name: value for name, value in run.items() if name != "wall_s"}

    first, second = numbers("--seed", 1), numbers("--seed", 2)
    assert first == numbers("--seed", 1)
    both = numbers("--seed", 1, "--seed", 2)
    assert both["ttft_ms"]["mean"] == pytest.approx(
        (first["ttft_ms"]["mean"] + second["ttft_ms"]["mean"]) / 2
    )


def test_windows_failures_replicas_and_loss_are_options(trace: Path) -> None:
    [run] = replayed(
        *(trace, "--workers", 2, "--from", 5, "--until", 20, "--fail", "1@3+4"),
        *("--replicas", 2, "--event-delay-ms", 20, "--event-loss", 0.1, "--blocks", 400),
        *("--host-blocks", 900, "--block-size", 32, "--profile", "llama-70b-4xh100"),
    )
    assert (run["requests"], run["failed"]) == (30, 0)


def test_prompts_and_answers_may_have_workers_of_their_own(trace: Path) -> None:
    [run] = replayed(
        *(trace, "--workers", 4, "--prefill-workers", 2, "--engines-per-host", 2),
        *("--approximate-workers", 1, "--event-jitter-ms", 2, "--past-router", 0.0),
    )
    assert (run["requests"], run["failed"]) == (60, 0)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chitu"])
def test_every_engine_replays(engine: str, trace: Path) -> None:
    done = kvroute("replay", trace, "--engine", engine, "--engine-option", "max_num_seqs=32")
    assert done.exit_code == 0, done.output
    assert f"8 workers ({engine})" in done.output


def test_a_slice_that_ships_is_a_trace(tmp_path: Path) -> None:
    done = kvroute("replay", "conversation", "--until", 60, "--rate", 10)
    assert done.exit_code == 0, done.output
    assert "stamped in ticks of 3 s, which are spread" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("replay nowhere.jsonl", 2, "nowhere.jsonl: No such file or directory"),
        ("replay {trace} --policy best", 2, "unknown policy 'best'; there are"),
        ("replay {trace} --compare best", 2, "unknown policy 'best'"),
        ("replay {trace} --shadow best", 2, "unknown policy 'best'"),
        ("replay {trace} --rate fast", 2, "'fast': expected numbers such as 1,3,6"),
        ("replay {trace} --rate 1,0", 2, "every rate must be more than 0"),
        ("replay {trace} --fail worker-1", 2, "expected WORKER@SECONDS"),
        ("replay {trace} --fail 8@1", 2, "--fail: needs a fleet of 9 workers, not 8"),
        ("replay {trace} --prefill-workers 8", 2, "--prefill-workers: needs a fleet of 9"),
        ("replay {trace} --event-jitter-ms 9", 2, "must be at most --event-delay-ms"),
        ("replay {trace} --block-size 48", 2, "choose a power of 2, such as 64"),
        ("replay {trace} --profile abacus", 2, "no such profile: abacus; there are"),
        ("replay {trace} --preset batsch", 2, "'batsch' is not one of"),
        ("replay {trace} --engine abacus", 2, "'abacus' is not one of"),
        ("replay {trace} --engine-option colour=red", 2, "vllm has no option 'colour'"),
        ("replay {trace} --engine-option policy", 2, "expected NAME=VALUE"),
        ("replay {trace} --engine chitu --host-blocks 9", 2, "chitu has no host cache here"),
        ("replay {trace} --engine chitu-skew", 2, "a dense cache has room"),
        ("replay {trace} --from 1000", 1, "no request of the trace is left to play"),
        ("replay {trace} --warm-up 1000", 1, "the warm-up takes all requests"),
        ("replay {trace} --json /dev/null/a", 2, "there is no folder /dev/null"),
        ("replay {trace} --csv nowhere/a", 2, "there is no folder nowhere"),
        ("demo --policy best --json nowhere/a", 2, "there is no folder nowhere"),
        ("replay {trace} --order fifo", 1, "unknown order 'fifo'"),
        ("replay {trace} --queue order=fifo", 1, "unknown order 'fifo'"),
        ("replay {trace} --queue max=1", 2, "max"),
        ("replay {trace} --queue bands=[{{", 2, "not YAML"),
        ("replay {trace} --priority-of fast", 2, "expected trace, random:LOW,HIGH:SHARE"),
        ("capacity {trace} --ttft-ms 1 --workers-max 3", 1, "no number of workers keeps 1 ms"),
        (
            "capacity {trace} --ttft-ms 500 --from 1000",
            1,
            "no request of the trace is left to play",
        ),
        ("capacity {trace} --ttft-ms 500 --warm-up 1000", 1, "the warm-up takes all requests"),
        ("capacity {trace} --ttft-ms 500 --prefill-workers 2", 2, "a fleet of 3 workers, not 1"),
        (
            "capacity {trace} --ttft-ms 500 --fail 1@5",
            2,
            "--fail: needs a fleet of 2 workers, not 1",
        ),
        (
            "capacity {trace} --ttft-ms 1 --workers-min 9 --workers-max 3",
            1,
            "there is no fleet of 9 to 3 workers",
        ),
        ("simulate --host my-node", 2, "'my-node' is no IP address"),
        ("simulate --host 203.0.113.1", 1, "assign requested address"),
        ("simulate --host 0.0.0.0 --gateway 0.0.0.0:0", 1, "callers need no keys"),
        ("simulate --engines 1 --gateway 0.0.0.0:0", 1, "0.0.0.0:0 is not loopback"),
        ("simulate --engines 1 --gateway nonsense", 1, "nonsense"),
        ("simulate --gateway --write-config a.yaml", 2, "--write-config is for engines without"),
        ("simulate --gateway 127.0.0.1:0 --drain-s 1", 2, "and --gateway can't be given"),
        ("simulate --engines 0", 2, "there is no engine to run"),
        ("simulate --engines 10 --port 65530", 2, "there are not enough ports from 65530 on"),
        ("simulate --engine vllm --prefill 1", 2, "are for --engine sglang, not vllm"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    words: str, code: int, message: str, trace: Path
) -> None:
    done = kvroute(*words.format(trace=trace).split())
    assert done.exit_code == code, done.output
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert "keep the promise" not in done.output


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,input_length,output_length\n0,100,1\n1,-4,1\n")
    done = kvroute("replay", path)
    assert done.exit_code == 2
    assert f"{path}: line 3, column input_length: '-4': expected int >= 1" in done.output


@pytest.mark.parametrize("command", [["replay"], ["capacity", "--ttft-ms", 5000]])
def test_what_each_column_of_a_trace_was_taken_for_is_shown(command: list[object]) -> None:
    done = kvroute(*command, FORMS / "burstgpt_sessions.csv")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("burstgpt_sessions: 3 requests")
    clock = "arrival, in seconds or as date and time, counted from the first row"
    assert lines[1] == f"  Timestamp        {clock}"
    assert "  Request tokens   prompt tokens" in lines
    assert "  Elapsed time     not read" in lines


def test_a_trace_has_blocks_of_the_size_that_is_given() -> None:
    path = FORMS / "bailian.jsonl"
    done = kvroute("replay", path, "--trace-block-size", 16)
    assert done.exit_code == 0, done.output
    done = kvroute("replay", path)
    assert done.exit_code == 2
    assert "line 1, column hash_ids: " in done.output
    assert "--trace-block-size 16 would fit" in done.output
    done = kvroute("replay", path, "--trace-block-size", 16, "--block-size", 24)
    assert done.exit_code == 2
    assert "blocks of 24 are no part and no multiple of that" in done.output


def test_a_routers_file_gives_its_routing(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("routing: {expected_output_tokens: 300}\n")
    assert kvroute("replay", trace, "-c", file, "--until", 5).exit_code == 0
    file.write_text("routing: {nonsense: 1}\n")
    done = kvroute("replay", trace, "-c", file)
    assert done.exit_code == 2
    assert "nonsense" in done.output


def test_the_policy_is_that_of_the_command_else_of_the_file_or_the_preset(
    trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("routing: {policy: least-loaded}\n")
    short = (trace, "--until", 2)
    own = "simulator.world.yardsticks:random"
    for words, policies in (
        ((), ["dynamo-adaptive"]),
        (("--preset", "chat"), ["ttft"]),
        (("--preset", "chat", "-c", file), ["least-loaded"]),
        (("--preset", "chat", "-c", file, "--policy", "round-robin"), ["round-robin"]),
        (("--preset", "chat", "--compare", f"{own},ttft"), ["ttft", own]),
    ):
        assert [run["policy"] for run in replayed(*short, *words)] == policies


def test_capacity_finds_the_smallest_fleet(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "capacity.json"
    options = ("--ttft-ms", 120, "--percentile", "p90", "--rate", 40, "--json", file)
    done = kvroute("capacity", trace, *options)
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert (told["trace"], told["policy"], told["rate"]) == ("small", "dynamo-adaptive", 40.0)
    kept = {trial["workers"]: trial["kept"] for trial in told["trials"]}
    smallest = told["workers"]
    assert kept[smallest]
    assert kept[smallest + 1]
    assert not kept[smallest - 1]
    assert f"{smallest} workers keep the promise with dynamo-adaptive." in done.output
    assert kvroute("capacity", trace, *options, "--quiet").output == f"{smallest}\n"


@pytest.mark.parametrize(("enabled", "flags"), [(False, ["--hot-prefixes"]), (True, [])])
def test_hot_prefixes_are_copied_when_asked_for(
    enabled: bool, flags: list[str], tmp_path: Path
) -> None:
    path, router = tmp_path / "hot.csv", tmp_path / "router.yaml"
    lines = ["arrival_s,input_length,output_length,prefix_id,prefix_tokens"]
    lines += [f"{i / 20},9000,50,system,8192" for i in range(200)]
    path.write_text("\n".join(lines) + "\n")
    settings = {"enabled": enabled}
    router.write_text(yaml.safe_dump({"routing": {"hot_prefixes": settings}}))
    [run] = replayed(path, "--policy", "conductor", "-c", router, *flags)
    assert run["copies"] > 0


@asynccontextmanager
async def simulating(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process of `kvroute simulate`, and what it has shown; the block must make it end well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.app.main", "simulate", *words),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        shown = ""
        async with asyncio.timeout(180):
            while "Ctrl-C" not in shown:
                shown += (await process.stdout.readline()).decode()
        yield process, shown
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_simulated_engines_answer_until_they_are_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    words = ("--engines", "2", "--speed", "100", "--model", "toy", "--engine", "sglang")
    async with simulating(*words, "--write-config", str(file)) as (process, shown):
        workers = yaml.safe_load(file.read_text())["workers"]
        assert [worker["id"] for worker in workers] == ["worker-0", "worker-1"]
        for worker in workers:
            for key in ("address", "events", "replay"):
                assert worker[key] in shown
        assert f"kvroute serve --config {file}" in shown
        async with aiohttp.ClientSession(workers[1]["address"]) as session:
            asked = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
            async with session.post("/v1/chat/completions", json=asked) as response:
                assert (await response.json())["model"] == "toy"
        process.send_signal(signal.SIGINT)


async def test_engines_that_are_to_end_finish_what_has_begun(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    words = ("--prefill", "1", "--engines", "1", "--speed", "50", "--drain-s", "60")
    async with simulating(*words, "--write-config", str(file)) as (process, _):
        workers = yaml.safe_load(file.read_text())["workers"]
        assert [worker["id"] for worker in workers] == ["worker-0", "prefill-0"]
        assert {worker["engine"] for worker in workers} == {"sglang"}
        asked = {"prompt": "hi", "max_tokens": 2000, "stream": True}
        async with (
            aiohttp.ClientSession(workers[0]["address"]) as session,
            session.post("/v1/completions", json=asked) as response,
        ):
            await response.content.readline()
            process.send_signal(signal.SIGTERM)
            assert (await response.text()).rstrip().endswith("data: [DONE]")


def test_engines_that_others_reach_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    for host, warned in (("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("::", True)):
        warn_of_strangers(Console(), host)
        assert ("check no keys" in capsys.readouterr().out) is warned


@pytest.mark.long
async def test_a_simulated_gateway_answers_openais_clients_and_shows_its_picks(
    tmp_path: Path,
) -> None:
    openai = pytest.importorskip("openai")
    words = ("--gateway", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--speed", "100")
    async with simulating(*words) as (process, page):
        (base,) = re.findall(r"OpenAI's API +(\S+/v1),", page)
        assert f"curl -i {base}/chat/completions " in page
        root = base.removesuffix("/v1")
        shown = [line.strip() for line in page.splitlines() if line.startswith("  ")]
        (body,), (asks,) = (
            [line for line in shown if line.startswith(word)]
            for word in ("echo ", "kvroute explain")
        )
        await _shell(body, tmp_path)
        for _ in range(2):
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"{base}/chat/completions", data=(tmp_path / "chat.json").read_bytes()
                ) as chatted,
            ):
                assert chatted.status == 200
        explained = await _shell(asks.partition("#")[0] + " --json", tmp_path)
        overlaps = [
            row.get("overlapTokens", {}).get("usable", 0)
            for row in json.loads(explained)["candidates"]
        ]
        assert max(overlaps) >= 128, "what the page says is shown by what it prints"
        assert f"Anthropic's   {root}, the same\n" in page
        message = {"model": "stand-in", "messages": [{"role": "user", "content": "Hi"}]}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{root}/v1/messages", json=message | {"max_tokens": 2}) as answered,
        ):
            assert (answered.status, (await answered.json())["role"]) == (200, "assistant")
        chat = {"model": "stand-in", "messages": [{"role": "user", "content": "hello " * 50}]}
        async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
            create = client.chat.completions.with_raw_response.create
            first, second = await create(**chat), await create(**chat)
        assert "X-Kvroute-Worker" in first.headers
        assert first.headers["X-Kvroute-Worker"] == second.headers["X-Kvroute-Worker"]
        assert int(first.headers["X-Kvroute-Overlap-Tokens"]) == 0
        answer = second.parse()
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == int(second.headers["X-Kvroute-Overlap-Tokens"]) == 320
        assert answer.choices[0].message.content.startswith("I am a stand-in. ")
        process.send_signal(signal.SIGINT)


async def _shell(line: str, folder: Path) -> str:
    """What a printed command prints, where `kvroute` is this environment's."""
    words = line.replace("kvroute ", f"{sys.executable} -m router.app.main ", 1)
    process = await asyncio.create_subprocess_shell(
        f"cd {folder} && PYTHONPATH={Path.cwd()} {words}", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


def test_simulate_ends_when_a_port_is_taken() -> None:
    """Run as a process: what it must not do is hang at its end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("simulate", "--engines", "1", "--port", str(port - 1))
        done = subprocess.run(
            [sys.executable, "-m", "router.app.main", *words],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1, done.stderr
    assert f"Address already in use (addr='tcp://127.0.0.1:{port}')" in done.stderr
