"""Conditions that a request sets on its worker, in addition to model and role. Pure."""

from typing import NamedTuple

from events.plane.facts import Heartbeat


class Narrowing(NamedTuple):
    """Conditions that exclude workers of a request's model and role; an empty field excludes none.

    A field's rule is in `excludes`; router/api/desk/request_codec.py reads the fields.
    """

    lora_name: str = ""
    """LoRA of the prompt. A worker that lists its LoRAs, lacks this one and can't load it is
    excluded."""
    required_labels: frozenset[tuple[str, str]] = frozenset()
    allowed_workers: frozenset[str] = frozenset()
    excluded_workers: frozenset[str] = frozenset()
    excluded_labels: frozenset[tuple[str, str]] = frozenset()

    @property
    def or_none(self) -> "Narrowing | None":
        """These conditions, or None if they exclude no worker."""
        return self if any(self) else None

    @property
    def names(self) -> int:
        """Number of workers and labels that the conditions name."""
        return sum(map(len, self[1:]))

    @property
    def confines(self) -> bool:
        """Whether labels or allowed workers reserve the prompt for some workers, so that no other
        gets a copy of it. excluded_workers (they failed) and lora_name (a copy keeps it) don't
        count."""
        return any(self._replace(lora_name="", excluded_workers=frozenset()))

    def excludes(self, worker_id: str, heartbeat: Heartbeat) -> str:
        """Reason why these conditions exclude a worker; empty: they don't."""
        if worker_id in self.excluded_workers:
            return "excluded by the request"
        if self.allowed_workers and worker_id not in self.allowed_workers:
            return "not among the allowed"
        for name, value in self.required_labels:
            if heartbeat.labels.get(name) != value:
                return "labels differ"
        for name, value in self.excluded_labels:
            if heartbeat.labels.get(name) == value:
                return "label excluded"
        loras = heartbeat.lora_names  # an engine that lists none may have any
        if loras and self.lora_name and self.lora_name not in loras and not heartbeat.loads_loras:
            return "LoRA not loaded"
        return ""
