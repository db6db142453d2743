"""Metrics in Prometheus' text format. Pure."""

from collections.abc import Mapping, Sequence

from simulator.live.latencies import Histogram

Labels = Mapping[str, str]


def metric(name: str, kind: str, labels: Labels, value: float) -> str:
    return family(name, kind, [(labels, value)])


def family(name: str, kind: str, samples: Sequence[tuple[Labels, float]]) -> str:
    lines = "".join(_sample(name, labels, value) for labels, value in samples)
    return f"# TYPE {name} {kind}\n{lines}"


def histogram(name: str, labels: Labels, observed: Histogram) -> str:
    samples = [
        _sample(f"{name}_bucket", {**labels, "le": bound}, count)
        for bound, count in observed.buckets()
    ]
    samples.append(_sample(f"{name}_count", labels, observed.count))
    samples.append(_sample(f"{name}_sum", labels, observed.sum_s))
    return f"# TYPE {name} histogram\n{''.join(samples)}"


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{label}="{_escape(text)}"' for label, text in sorted(labels.items()))
    return f"{name}{{{inside}}} {float(value)!r}\n" if inside else f"{name} {float(value)!r}\n"


def _escape(label_value: str) -> str:
    return label_value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
