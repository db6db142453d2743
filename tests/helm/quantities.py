"""Kubernetes quantities as numbers."""


def bytes_of(quantity: str) -> int:
    assert quantity[-2:] in ("Mi", "Gi")
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]
