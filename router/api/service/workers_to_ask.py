"""The workers that make prompt tokens for the router: which is next for a model, and whose tokens
differ from the router's own."""

from collections import Counter
from math import inf

from events.feed.fleet_view import Source
from router.decide.core.core import RouterCore
from router.fleet.pools import Pool, heartbeat_of
from router.fleet.state import Trouble
from router.request.dialects.table import DIALECTS
from router.request.proving.proof import Target
from router.request.refusal import Refusal
from router.request.tokens import EngineAt, Prompts, described

MODELS_MAX = 1024
TRIES_MAX = 64
"""Workers that are examined at most, for one whose tokens did not differ and that was usable."""


class WorkersToAsk:
    """Chooses workers of a model, in turn, to make prompt tokens."""

    def __init__(self, core: RouterCore, prompts: Prompts) -> None:
        self._core = core
        self._prompts = prompts
        self._turns: Counter[str] = Counter()

    def estimate_max(self, model: str) -> float:
        """The longest estimate of a prompt's length, in tokens: half of what the model's shortest
        worker takes (inf: no such model), since an estimate is no reason to refuse a request (the
        bytes of an image are many)."""
        pool = self._pool(model)
        return inf if pool is None else pool.shortest_len // 2

    def longest(self, model: str) -> float:
        """Most tokens of prompt and output that any worker of the model takes; inf: unknown."""
        pool = self._pool(model)
        sources = [] if pool is None else pool.sources
        return max((heartbeat_of(source).max_model_len or inf for source in sources), default=inf)

    def next(self, model: str) -> EngineAt | None:
        """The next live worker of the model with an address; workers whose tokens differed or were
        unusable lately come last. None: there is none, or its engine can't make tokens.
        """
        fleet = self._core.fleet
        fleet.pools.refresh()
        pool = self._pool(model)
        if pool is None or not len(pool):
            return None
        if len(self._turns) >= MODELS_MAX:
            self._turns.clear()
        self._turns[model] += 1
        base = fleet.base_model(model)
        first: EngineAt | None = None
        for step in range(min(len(pool), TRIES_MAX)):
            engine = _engine(pool.sources[(self._turns[model] + step) % len(pool)])
            if engine is None or not (
                self._prompts.is_odd(base, engine) or self._prompts.rests(engine)
            ):
                return engine
            first = first or engine
        return first

    def _pool(self, model: str) -> Pool | None:
        """The live workers of a model; None: there is no such model."""
        try:
            return self._core.fleet.pools.live(model, self._core.fleet.ready)[0]
        except Refusal:
            return None


def _engine(source: Source) -> EngineAt | None:
    heartbeat = heartbeat_of(source)
    if heartbeat.engine not in DIALECTS or not heartbeat.address.startswith("http"):
        return None
    return EngineAt(
        heartbeat.engine,
        heartbeat.engine_version,
        heartbeat.address.rstrip("/"),
        f"{source.key.worker_id}/{heartbeat.epoch}",
        heartbeat.model,
        source.key.worker_id,
    )


def tokens_trouble(prompts: Prompts) -> Trouble:
    """Makes the function that says, as a warning, why a worker's tokens differ from the router's or
    from those of other workers; its text is empty where they don't differ.
    """

    def trouble(source: Source, model: str) -> str:
        heartbeat = source.heartbeat
        if heartbeat is None:
            return ""
        mine = Target(heartbeat.engine, heartbeat.engine_version)
        if odd := prompts.proof.odd(model, mine, source.key.worker_id):
            return (
                f"its engine makes other tokens than those of the other workers and the router for"
                f" {len(odd)} shapes of prompts, such as {odd[0].shape}:"
                f" {described(odd[0].difference)}. Its cached tokens can't be predicted: make its"
                " chat template, its default chat_template_kwargs and its tokenizer equal to those"
                " of the others"
            )
        barred = [entry for entry in prompts.proof.barred(model) if entry.target == mine]
        if not barred:
            return ""
        _, shape, difference = barred[0]
        return (
            f"its engine makes other tokens than the router for {len(barred)} shapes of prompts,"
            f" such as {shape}: {described(difference)}. Its tokens are taken for these shapes,"
            " which costs a call to an engine for each prompt: make prompts.folder, chat_template"
            " and chat_template_kwargs equal to the engine's"
        )

    return trouble


def proof_trouble(prompts: Prompts) -> Trouble:
    """Makes the function that says, as a warning, why the router's tokens can't be compared with a
    worker's; its text is empty where they can be.
    """

    def trouble(source: Source, model: str) -> str:
        settings = prompts.models.get(model)
        why = prompts.lacking.get((model, source.key.worker_id))
        if not why or settings is None or settings.renderer is None or settings.render:
            return ""
        return (
            f"{why}, so that the router's own tokens of this model are never proven by it, and are"
            " not forwarded. Set models[].prompts.source to local where prompts.folder and"
            " chat_template are known to be the engine's, or prompts.render to a render service"
        )

    return trouble
