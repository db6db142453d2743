"""The pages of one router's console. There are none if a network could reach them without keys."""

import logging
import os
from collections.abc import Callable

from router.api.desk.counters import Metrics, kvroute_version
from router.app.processes.locks import Locks
from router.config.settings.configurations import ServeConfig
from router.decide.core.admission import Admission
from router.decide.core.core import RouterCore
from router.net.keys.exposure import is_private
from router.observe.audit.observers import Watchers
from router.observe.console.console import Console
from router.observe.console.pages import ConsolePages
from router.observe.console.sessions import SESSION_S, Sessions
from router.observe.views.summary import Subject

log = logging.getLogger("kvroute")


def console_pages(
    config: ServeConfig,
    locks: Locks,
    core: RouterCore,
    admission: Admission,
    watchers: Watchers,
    metrics: Metrics,
    *,
    connected: Callable[[], bool],
    clock: Callable[[], float],
) -> ConsolePages | None:
    """The pages of the console that the configuration describes; None: it is off, or would be
    open to a network. connected: whether there is a connection to NATS."""
    if not config.console.enabled or not config.metrics.listen:
        return None
    if locks.door is None and not is_private(config.metrics.listen):
        log.warning(
            "no console: metrics.listen is %s, not loopback, and there are no keys: set keys.file",
            config.metrics.listen,
        )
        return None
    about = {
        "replica": core.replica,
        "version": kvroute_version(),
        "fleet": config.fleet.name,
        "started_at_s": clock(),
    }
    subject = Subject(
        core=core,
        admission=admission,
        watchers=watchers,
        tally=metrics.tally,
        refused=metrics.refusals,
        connected=connected,
        about=about,
    )
    return ConsolePages(
        Console(subject, clock),
        config.console,
        door=locks.door,
        secure=locks.metrics_tls is not None,
        sessions=Sessions(SESSION_S, os.urandom),
        clock=clock,
    )
