"""Child processes that render bodies, since Jinja holds the interpreter for milliseconds.

Laws:
- a body is rendered by one child, which has no other body meanwhile;
- the bodies that wait are bounded, and one more is refused with RENDER_QUEUE_FULL;
- a render that takes longer than its limit ends with its child, which is killed, and no other body
  ends with it;
- a child's address space is bounded, so that no template takes the memory of others;
- no child outlives `close`, or this process.
"""

import asyncio
import os
import signal
import socket
import sys
from collections import Counter
from contextlib import suppress

from typing_extensions import override

from router.request.bodies import BodyFormat
from router.request.prompt_error import PromptError
from router.request.prompt_processes.frames import SIZES, Done, Job, framed, read_header
from router.request.prompt_settings import MEMORY_BYTES, RendererSettings
from router.request.refusal import Reason

QUEUE_MAX = 64
"""Most bodies that wait for one child."""
RENDER_S = 5.0
"""Longest time for one body, seconds."""
LOAD_S = 60.0
"""Longest time for a model's tokenizer, seconds, which a child loads before the first body."""
AWAY_S = 1.0
"""Seconds until a child is started again after one that died before its first answer."""
SPILL = 2
"""Bodies at a child past which the next body goes to the least busy child, whose cache is colder.
"""
_PROGRAM = ("-m", "router.request.prompt_processes.child")


class Children:
    """A pool of processes, each started by its first body."""

    def __init__(
        self,
        processes: int,
        *,
        queue_max: int = QUEUE_MAX,
        render_s: float = RENDER_S,
        load_s: float = LOAD_S,
        memory_bytes: int = MEMORY_BYTES,
        program: tuple[str, ...] = _PROGRAM,
    ) -> None:
        """queue_max: bound of bodies that wait for a child. memory_bytes: address space of each
        child. program: arguments of the interpreter, to which this process's id and memory_bytes
        are added.
        """
        self.program = (*program, str(os.getpid()), str(memory_bytes))
        self.queue_max = queue_max
        self.render_s = render_s
        self.load_s = load_s
        self.killed: Counter[str] = Counter()
        """Children killed or lost, by cause: time, or exit."""
        self._children = [_Child(self) for _ in range(processes)]

    @property
    def waiting(self) -> int:
        """Number of bodies that wait or are being rendered."""
        return sum(child.load for child in self._children)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.pid for child in self._children if child.pid is not None]

    async def render(
        self,
        model: str,
        settings: RendererSettings,
        kind: BodyFormat,
        content: bytes,
        engine: str,
        affinity: int,
    ) -> tuple[Done, bytes]:
        """A body's result and tokens (little-endian u32). affinity: bodies with the same number go
        to the same child, while it has few others. Raises PromptError."""
        child = self._children[affinity % len(self._children)]
        if child.load > SPILL:
            child = min(self._children, key=lambda child: child.load)
        return await child.run(Job(model, settings, kind.name, engine), content)

    async def close(self) -> None:
        """Ends every child; bodies without tokens end with RENDERER_UNAVAILABLE."""
        for child in self._children:
            child.stop()
        for child in self._children:
            await child.ended()


class _Child:
    """One place in the pool: a process, or none yet, and the bodies that take turns at it."""

    def __init__(self, pool: Children) -> None:
        self._pool = pool
        self._process: _Process | None = None
        self._turn = asyncio.Lock()
        """Held while the process has a body."""
        self._waiting = 0
        self._work: asyncio.Task[tuple[Done, bytes]] | None = None
        self._not_before_s = 0.0
        self._closed = False

    @override
    def __repr__(self) -> str:
        return f"<child {self.pid}, {self.load} bodies>"

    @property
    def load(self) -> int:
        """Bodies that it renders, or that wait for it."""
        return self._waiting + self._turn.locked()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self, job: Job, content: bytes) -> tuple[Done, bytes]:
        """Renders a body when its turn has come. Raises PromptError."""
        if self._waiting >= self._pool.queue_max:
            raise PromptError(
                Reason.RENDER_QUEUE_FULL,
                f"{self._waiting} bodies wait for tokens, which is the bound for a process"
                " (prompts.processes)",
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:  # a caller that leaves does not end it: the process has the body, and answers
            done, tokens = await asyncio.shield(self._begun(job, content))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and (caller is None or not caller.cancelling()):
                raise _unavailable(
                    "its process was stopped, with the router or for a reload"
                ) from None
            raise
        if done.reason:
            raise PromptError(Reason[done.reason], done.message, done.shape)
        return done, tokens

    def stop(self) -> None:
        self._closed = True
        if self._work is not None:
            self._work.cancel()

    async def ended(self) -> None:
        if self._work is not None:
            await asyncio.wait({self._work})
        if self._process is not None:
            await self._process.end()
            self._process = None

    def _begun(self, job: Job, content: bytes) -> "asyncio.Task[tuple[Done, bytes]]":
        work = asyncio.get_running_loop().create_task(self._one(job, content))
        work.add_done_callback(self._over)
        self._work = work
        return work

    def _over(self, work: "asyncio.Task[tuple[Done, bytes]]") -> None:
        self._work = None
        self._turn.release()
        _ = work.cancelled() or work.exception()  # read, in case that its caller is gone

    async def _one(self, job: Job, content: bytes) -> tuple[Done, bytes]:
        """Renders one body; every failure of the process raises PromptError."""
        try:
            return await self._rendered(job, content)
        except PromptError:
            raise
        except OSError as error:
            raise _unavailable(f"no process that renders can be started: {error}") from None
        except Exception as error:  # of one body: those behind it have their turn
            await self._lost("exit")
            raise _unavailable(
                f"the process that rendered it failed: {type(error).__name__}"
            ) from None

    async def _rendered(self, job: Job, content: bytes) -> tuple[Done, bytes]:
        """Renders a body. First loads the tokenizer if the child lacks it: a job of its own, with a
        time limit of its own. Raises PromptError for a failed process."""
        if self._closed:
            raise _unavailable("its process was stopped, with the router or for a reload")
        process = await self._started()
        if process.loaded.get(job.model) != job.settings:
            loaded = await self._asked(process, Job(job.model, job.settings, "", ""), b"")
            if loaded[0].reason:
                return loaded
        return await self._asked(process, job, content)

    async def _asked(self, process: "_Process", job: Job, content: bytes) -> tuple[Done, bytes]:
        limit_s = self._pool.render_s if job.kind else self._pool.load_s
        try:
            async with asyncio.timeout(limit_s):
                result = await process.ask(job, content)
        except TimeoutError:
            await self._lost("time")
            raise _unavailable(
                f"rendering the body took {limit_s:g} s, the limit, and its process was killed"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._lost("exit")
            if not process.loaded:
                self._not_before_s = asyncio.get_running_loop().time() + AWAY_S
            raise _unavailable(
                f"the process that rendered the body ended with code {code}"
            ) from None
        if not job.kind and not result[0].reason:
            process.loaded[job.model] = job.settings
        return result

    async def _started(self) -> "_Process":
        if self._process is None:
            if asyncio.get_running_loop().time() < self._not_before_s:
                raise _unavailable("the process that renders ended at its start, less than 1 s ago")
            self._process = await _Process.start(self._pool.program)
        return self._process

    async def _lost(self, cause: str) -> int:
        self._pool.killed[cause] += 1
        process, self._process = self._process, None
        return await process.end() if process is not None else 0


class _Process:
    """A child that runs, and the socket to it."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.loaded: dict[str, RendererSettings] = {}
        """Models whose tokenizer the process has loaded -> settings with which it did."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, program: tuple[str, ...]) -> "_Process":
        """Starts a child. Spawned, not forked: a fork copies the state of gRPC's threads, not the
        threads."""
        ours, theirs = socket.socketpair()
        pid = None
        try:
            with theirs:
                pid = _spawned([sys.executable, *program], theirs.fileno())
            reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        except BaseException:  # the pool is closed meanwhile, say: nobody would know of the child
            ours.close()
            if pid is not None:
                _kill(pid)
                _exit_code(pid)
            raise
        return cls(pid, reader, writer)

    async def ask(self, job: Job, content: bytes) -> tuple[Done, bytes]:
        """The child's result of a job and its tokens. Raises ConnectionError or IncompleteReadError
        when the child is gone."""
        self._writer.write(framed(job, len(content)))
        self._writer.write(content)
        await self._writer.drain()
        header_size, size = SIZES.unpack(await self._reader.readexactly(SIZES.size))
        header = await self._reader.readexactly(header_size)
        tokens = await self._reader.readexactly(size) if size else b""
        return read_header(header, Done), tokens

    async def end(self) -> int:
        """Kills the process if it still runs; returns its exit code."""
        self._writer.close()
        _kill(self.pid)
        return await _reaped(self.pid)


async def _reaped(pid: int) -> int:
    """Waits for the end of a child; returns its exit code."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        code = _exit_code(pid)  # also for a caller that is cancelled, or the child stays a zombie
    return code


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _spawned(command: list[str], connection: int) -> int:
    """Starts a process in a session of its own, so that Ctrl-C and signals to our group reach us
    alone. connection: becomes its descriptor 0. Returns its process id."""
    return os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, connection, 0)],
        setsid=True,
        setsigmask=(),
    )


def _exit_code(pid: int) -> int:
    """The exit code of a process that has ended; below 0 it is the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _unavailable(message: str) -> PromptError:
    return PromptError(Reason.RENDERER_UNAVAILABLE, message)
