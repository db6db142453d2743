"""The names of models: configured ones with their aliases, and those that workers serve."""

from events.plane.facts import Heartbeat
from router.config.settings.configurations import ModelSettings

MODELS_MAX = 10_000
"""Served names that are remembered; further names are not."""

MODEL_MEMORY_S = 300.0
"""Seconds for which requests for a model that lost its last worker get UNAVAILABLE, so that their
callers try again: an engine takes minutes to load a model. Afterwards NOT_FOUND."""


class Models:
    """Maps models' names and aliases to models, and remembers which names were served."""

    def __init__(
        self, configured: tuple[ModelSettings, ...], memory_s: float = MODEL_MEMORY_S
    ) -> None:
        self._names = {
            name: (model.name, *model.aliases)
            for model in configured
            for name in (model.name, *model.aliases)
        }
        """Name of a configured model -> all its names, the canonical one first."""
        self._memory_s = memory_s
        self.seen: dict[str, float] = {}
        """Name -> when a worker last said that it serves it."""
        self._seen_whole: dict[str, float] = {}
        """Name of a model, or alias -> when a worker last said that it serves it; without LoRAs."""

    def names(self, model: str) -> tuple[str, ...]:
        """All names of a model, the canonical one first."""
        return self._names.get(model) or (model,)

    def known(self, model: str) -> bool:
        """Whether a model is configured, or was served by a worker lately."""
        return model in self._names or model in self.seen

    def is_whole(self, name: str) -> bool:
        """Whether a name is that of a model rather than of a LoRA: it is configured, or a worker
        served a model of that name lately.
        """
        return name in self._names or name in self._seen_whole

    def serves(self, heartbeat: Heartbeat, model: str) -> bool:
        """Whether a worker serves a model, by any of its names."""
        served = (heartbeat.model, *heartbeat.model_aliases, *heartbeat.lora_names)
        return any(name in served for name in self.names(model))

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Records the model and LoRAs that a worker's heartbeat lists."""
        whole = (heartbeat.model, *heartbeat.model_aliases)
        for seen, names in (
            (self.seen, (*whole, *heartbeat.lora_names)),
            (self._seen_whole, whole),
        ):
            for name in names:
                if name and (name in seen or len(seen) < MODELS_MAX):
                    seen[name] = now_s

    def tick(self, now_s: float) -> None:
        """Forgets names that were not served for a while."""
        for seen in (self.seen, self._seen_whole):
            gone = [name for name, at_s in seen.items() if now_s - at_s >= self._memory_s]
            for name in gone:
                del seen[name]
