"""Program that becomes another program, which ends when the process that started it ends.

    python -I -S launcher.py PARENT COMMAND...

router/cluster/children/process.py starts children by this program: it does what must be done in a
child before the child's own program, so that no process with threads has to be forked.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127


def main(parent: int, command: list[str]) -> None:
    """Sets up the process and runs the command in its place; never returns. parent: id of the
    parent process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # ours ended before prctl, so no signal will come
        os._exit(_NOT_STARTED)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what it starts would
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} can't be started: {error.strerror}\n")
        os._exit(_NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
