"""What a request demands of its worker, beside its model and role. Pure."""

from typing import NamedTuple

from events.plane.facts import Heartbeat


class Narrowing(NamedTuple):
    """What narrows a request to some workers of its model and role.

    Law: requests with equal narrowings may use the same workers, and a field that is empty excludes
    none. A new field needs its rule in `excludes`, and its reading in router/desk/request_codec.py.
    """

    lora_name: str = ""
    """That of the prompt."""
    required_labels: frozenset[tuple[str, str]] = frozenset()
    allowed_workers: frozenset[str] = frozenset()
    """Ids; empty: all."""
    excluded_workers: frozenset[str] = frozenset()

    @property
    def or_none(self) -> "Narrowing | None":
        """None where nothing narrows the request."""
        return self if any(self) else None

    @property
    def names(self) -> int:
        """Workers and labels that it names."""
        return len(self.required_labels) + len(self.allowed_workers) + len(self.excluded_workers)

    @property
    def confines(self) -> bool:
        """Whether the prompt is for some workers alone, so that others get no copy of its blocks.
        An excluded worker failed, or is busy: it may see them. Copies of a LoRA's blocks go to its
        workers anyway (router/copies/hot_prefixes.py)."""
        return any(self._replace(lora_name="", excluded_workers=frozenset()))

    def excludes(self, worker_id: str, heartbeat: Heartbeat) -> str:
        """Why it excludes a worker; empty where it doesn't."""
        if worker_id in self.excluded_workers:
            return "excluded by the request"
        if self.allowed_workers and worker_id not in self.allowed_workers:
            return "not among the allowed"
        for name, value in self.required_labels:
            if heartbeat.labels.get(name) != value:
                return "labels differ"
        if self.lora_name and not _may_serve(heartbeat, self.lora_name):
            return "LoRA not loaded"
        return ""


def would_load(heartbeat: Heartbeat, lora_name: str) -> bool:
    """Whether an engine has to load a LoRA for a request, and does so on demand."""
    return heartbeat.loads_loras and lora_name not in heartbeat.lora_names


def _may_serve(heartbeat: Heartbeat, lora_name: str) -> bool:
    """Whether an engine has a LoRA, or may load it; an engine that lists none may."""
    loras = heartbeat.lora_names
    return not loras or lora_name in loras or would_load(heartbeat, lora_name)
