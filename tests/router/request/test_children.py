"""The pool of processes that render: real children, with the real renderer or a stand-in."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.request import bodies
from router.request.prompt_error import PromptError
from router.request.prompt_processes import children
from router.request.prompt_processes.children import Children
from router.request.prompt_processes.frames import SIZES
from router.request.prompt_settings import RendererSettings
from router.request.refusal import Reason
from tests.stage.prompts.tiny_tokenizer import make_folder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'bad' %}{{ raise_exception('never so') }}{% endif %}"
)
CHAT, VLLM = bodies.CHAT, "vllm"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RendererSettings:
    folder = make_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    return RendererSettings(folder=str(folder))


def chat(content: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": "%s"}]}' % content.encode()


async def load(pool: Children, settings: RendererSettings, model: str = "m") -> str:
    """Has a first body rendered, and returns the digest of the tokenizer."""
    done, _ = await pool.render(model, settings, CHAT, chat("hello"), VLLM, 0)
    return done.digest


async def reason(work: object) -> Reason:
    with pytest.raises(PromptError) as caught:
        await work  # type: ignore[misc]
    return caught.value.reason


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def is_reaped(pid: int) -> bool:
    """Whether this process has no such child, not even a zombie."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def a_sleeper() -> int:
    return os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)


@asynccontextmanager
async def a_pool(processes: int, **about: Any) -> AsyncIterator[Children]:
    pool = Children(processes, **about)
    try:
        yield pool
    finally:
        await pool.close()


async def test_bodies_have_their_tokens_and_faulty_ones_their_reason(
    settings: RendererSettings,
) -> None:
    async with a_pool(1) as pool:
        digest = await load(pool, settings)
        done, tokens = await pool.render("m", settings, CHAT, chat("hello"), VLLM, 0)
        assert digest == done.digest
        assert len(tokens) == 4 * done.count == 4 * done.usage_tokens > 0
        assert done.shape == "chat"
        refused = pool.render("m", settings, CHAT, chat("bad"), VLLM, 0)
        assert await reason(refused) is Reason.TEMPLATE_REFUSED
        malformed = pool.render("m", settings, CHAT, b"{", VLLM, 0)
        assert await reason(malformed) is Reason.MALFORMED_BODY
        away = RendererSettings(folder="/nowhere")
        assert await reason(load(pool, away, "other")) is Reason.NO_TOKENIZER
        again = await pool.render("m", settings, CHAT, chat("hello"), VLLM, 0)
        assert again[1] == tokens
        assert not pool.killed
        (pid,) = pool.pids
    assert not runs(pid)


async def test_a_template_that_hangs_has_its_child_killed_and_the_next_body_is_rendered(
    settings: RendererSettings,
) -> None:
    async with a_pool(1, render_s=0.5) as pool:
        await load(pool, settings)
        (pid,) = pool.pids
        hangs = asyncio.create_task(pool.render("m", settings, CHAT, chat("hang"), VLLM, 0))
        after = asyncio.create_task(pool.render("m", settings, CHAT, chat("hello"), VLLM, 0))
        assert await reason(hangs) is Reason.RENDERER_UNAVAILABLE
        assert (await after)[0].count > 0
        assert pool.killed == {"time": 1}
        assert not runs(pid)


async def test_a_child_that_dies_costs_its_body_and_no_other(settings: RendererSettings) -> None:
    async with a_pool(1) as pool:
        await load(pool, settings)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        lost = asyncio.create_task(pool.render("m", settings, CHAT, chat("one"), VLLM, 0))
        after = asyncio.create_task(pool.render("m", settings, CHAT, chat("two"), VLLM, 0))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await reason(lost) is Reason.RENDERER_UNAVAILABLE
        assert (await after)[0].count > 0
        assert pool.killed == {"exit": 1}


async def test_the_queue_is_bounded_and_a_caller_that_leaves_makes_room(
    settings: RendererSettings,
) -> None:
    async with a_pool(1, queue_max=2) as pool:
        await load(pool, settings)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        tasks = []
        for i in range(3):  # one is with the child, two wait
            tasks.append(asyncio.create_task(load(pool, settings, str(i))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert pool.waiting == 3
        assert await reason(load(pool, settings, "x")) is Reason.RENDER_QUEUE_FULL
        tasks[1].cancel()
        await asyncio.wait({tasks[1]})
        assert pool.waiting == 2
        os.kill(pid, signal.SIGCONT)
        await tasks[0]
        await tasks[2]


async def test_a_busy_child_keeps_its_bodies_until_it_has_too_many(
    settings: RendererSettings,
) -> None:
    async with a_pool(2) as pool:
        for affinity in (0, 0, 1):
            await pool.render("m", settings, CHAT, chat("a"), VLLM, affinity)
        first = pool.pids[0]
        os.kill(first, signal.SIGSTOP)
        waits = [
            asyncio.create_task(pool.render("m", settings, CHAT, chat("a"), VLLM, 0))
            for _ in range(4)
        ]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert done == {waits[3]}
        os.kill(first, signal.SIGCONT)
        await asyncio.wait(waits)


async def test_a_child_that_can_t_begin_is_not_started_over_and_over() -> None:
    async with a_pool(1, program=("-c", "raise SystemExit(3)")) as pool:
        settings = RendererSettings(folder="/nowhere")
        for _ in range(3):
            assert await reason(load(pool, settings)) is Reason.RENDERER_UNAVAILABLE
        assert pool.killed == {"exit": 1}


async def test_closing_ends_bodies_that_wait(settings: RendererSettings) -> None:
    pool = Children(1)
    await load(pool, settings)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(load(pool, settings, str(i))) for i in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    for task in tasks:
        assert await reason(task) is Reason.RENDERER_UNAVAILABLE
    assert not runs(pid)
    assert await reason(load(pool, settings)) is Reason.RENDERER_UNAVAILABLE


PARENT = """
import asyncio, sys
from router.request.bodies import CHAT
from router.request.prompt_processes.children import Children
from router.request.prompt_settings import RendererSettings
async def main():
    pool = Children(2)
    settings = RendererSettings(folder=sys.argv[1])
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    for place in range(2):
        await pool.render("m", settings, CHAT, body, "vllm", place)
    print(*pool.pids, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_the_process_that_started_them(
    number: signal.Signals, settings: RendererSettings
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, settings.folder], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        descriptors = [os.pidfd_open(pid) for pid in pids]
        parent.send_signal(number)
    assert len(pids) == 2
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 20)[0], "the child is gone"
        os.close(descriptor)


async def test_a_first_body_that_hangs_has_the_time_of_a_body_not_that_of_loading(
    settings: RendererSettings,
) -> None:
    async with a_pool(1, render_s=0.5) as pool:
        for killed in (1, 2):  # the child that follows has loaded nothing either
            hangs = pool.render("m", settings, CHAT, chat("hang"), VLLM, 0)
            with pytest.raises(PromptError, match=r"0\.5 s"):
                await hangs
            assert pool.killed == {"time": killed}


@pytest.mark.parametrize("header", [b"\xff\xff\xff", b"\x80\x01\x02"])
async def test_a_child_that_answers_nonsense_costs_its_body_and_no_other(
    header: bytes, settings: RendererSettings
) -> None:
    answer = SIZES.pack(len(header), 0) + header
    program = f"import os, time; os.write(0, {answer!r}); time.sleep(600)"
    async with a_pool(1, program=("-c", program)) as pool:
        waits = [pool.render("m", settings, CHAT, chat("a"), VLLM, 0) for _ in range(2)]
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(error, PromptError)
            assert error.reason is Reason.RENDERER_UNAVAILABLE
        assert pool.killed == {"exit": 2}
        assert pool.waiting == 0


async def test_closing_while_a_child_starts_leaves_none_behind(
    settings: RendererSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    reached = asyncio.Event()
    spawned = children._spawned

    def counted(*about: Any) -> int:
        pids.append(spawned(*about))
        return pids[-1]

    async def never(**about: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(children, "_spawned", counted)
    monkeypatch.setattr(asyncio, "open_connection", never)
    pool = Children(1)
    waits = asyncio.create_task(load(pool, settings))
    await reached.wait()
    await pool.close()
    assert await reason(waits) is Reason.RENDERER_UNAVAILABLE
    assert is_reaped(pids[0])


async def test_a_caller_that_is_cancelled_while_its_child_ends_leaves_no_zombie() -> None:
    pid = a_sleeper()
    reaping = asyncio.create_task(children._reaped(pid))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    reaping.cancel()
    await asyncio.wait({reaping})
    assert is_reaped(pid)
