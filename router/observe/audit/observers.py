"""The observers of a router's decisions: its shadow policy, its decision log, and the console."""

import random
from collections.abc import Callable

from router.config.settings.configurations import ServeConfig
from router.decide.policies.configured import configured, shadow_policy
from router.observe.audit.decision_log import DecisionLog
from router.observe.audit.sampling import Sampled, Watch
from router.observe.audit.shadow_policy import Shadow


class Watchers:
    """Starts, stops and changes the observers of decisions."""

    def __init__(
        self,
        replica: str,
        rng: random.Random,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """rng: for sampling only. on_failure: called with the first error of an observer."""
        self.shadow: Shadow | None = None
        self.log = DecisionLog(replica)
        self.watch = Watch((), rng, on_failure)
        self._configured: list[Sampled] = []
        self._looking: dict[str, Sampled] = {}
        self.timed = False
        """Whether an observer needs predicted times of all picks, by any policy: a timed shadow
        policy, or the decision log, for replays of it."""

    async def use(self, config: ServeConfig) -> None:
        """Puts the configured observers in force, or raises ConfigError and changes nothing."""
        routing, settings = config.routing, config.decision_log
        policy = shadow_policy(routing, configured(routing))
        await self.log.use(settings)  # the last that may fail
        if policy is None:
            self.shadow = None
        else:
            shadow = Shadow(policy, routing.guard)
            if self.shadow is None or self.shadow.settings != shadow.settings:
                self.shadow = shadow  # counts of other settings do not carry over
        self._configured = []
        if self.shadow is not None:
            self._configured.append(Sampled(self.shadow.watch, routing.shadow_share))
        if self.log.is_on:
            self._configured.append(Sampled(self.log.watch, settings.share, self.log.watch_refused))
        self._use_all()
        self.timed = self.log.is_on or (self.shadow is not None and self.shadow.policy.timed)

    def look(self, looking: Sampled | None, viewer: str = "console") -> None:
        """Sets the observer of a viewer such as the console, beside the configured ones, in place
        of its earlier one; None: removes it.
        """
        self._looking.pop(viewer, None)
        if looking is not None:
            self._looking[viewer] = looking
        self._use_all()

    def _use_all(self) -> None:
        self.watch.use([*self._configured, *self._looking.values()])
