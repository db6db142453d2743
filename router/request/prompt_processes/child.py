"""A child process that renders: `python -m router.request.prompt_processes.child`, its socket as
descriptor 0.

It ends with the process that started it: Linux kills it when that process dies, and the end of the
socket ends it otherwise.

Law: its address space is bounded before its first job, so that a template that takes too much
memory gets a MemoryError, and only its job fails. Without the bound, where the kernel promises
memory that it has not (vm.overcommit_memory = 1, as on every Kubernetes node), the kernel would
kill some process.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from time import perf_counter

from router.request.bodies import BY_NAME
from router.request.prompt_error import PromptError
from router.request.prompt_processes.frames import SIZES, Done, Job, framed, read_header
from router.request.refusal import Reason
from router.request.rendering.renderer import Renderer

_PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket) -> None:
    """Answers jobs, one after another, until the other end closes."""
    renderers: dict[str, tuple[Job, Renderer]] = {}
    with connection.makefile("rb") as jobs:
        while len(sizes := jobs.read(SIZES.size)) == SIZES.size:
            header_size, size = SIZES.unpack(sizes)
            header, content = jobs.read(header_size), jobs.read(size)
            if len(header) + len(content) < header_size + size:
                return
            done, tokens = _render(renderers, read_header(header, Job), content)
            connection.sendall(framed(done, len(tokens)))
            connection.sendall(tokens)


def _render(
    renderers: dict[str, tuple[Job, Renderer]], job: Job, content: bytes
) -> tuple[Done, bytes]:
    began_s = perf_counter()  # a measurement, not a decision
    try:
        known = renderers.get(job.model)
        if known is None or known[0].settings != job.settings:
            renderers.pop(job.model, None)
            known = renderers[job.model] = job, Renderer(job.settings)
        renderer = known[1]
        if not job.kind:
            return Done(digest=renderer.digest), b""
        rendered = renderer.render(BY_NAME[job.kind], content, job.engine)
    except PromptError as error:
        return Done(reason=error.reason, message=error.message, shape=error.shape), b""
    except Exception as error:  # of one body: the next one has its turn
        message = f"rendering failed: {type(error).__name__}: {error}"[:500]
        return Done(reason=Reason.RENDERER_UNAVAILABLE, message=message), b""
    return (
        Done(
            count=rendered.count,
            usage_tokens=rendered.usage_tokens,
            shape=rendered.shape,
            digest=renderer.digest,
            seconds=perf_counter() - began_s,  # the same
        ),
        rendered.token_bytes,
    )


def bound_memory(memory_bytes: int) -> None:
    """Bounds this process's address space for good, to memory_bytes or a lower bound in force."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(hard, memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Serves the parent until it closes the socket. Arguments: the parent's process id, and the
    bound of the address space in bytes. Raises SystemExit when the parent is gone already."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(0)
    bound_memory(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=0) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
