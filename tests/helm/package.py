"""Packages the chart for an OCI registry: dist/kvroute-VERSION.tgz, checked before and after.

    python -m tests.helm.package [FOLDER]

`helm push dist/kvroute-VERSION.tgz oci://REGISTRY` publishes the archive.
"""

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import helm_python as helm
import kubernetes_validate
import yaml

from tests.distribution.project import of_chart
from tests.helm.rendered import CHART, EXAMPLES, Rendered, values_of

NOT_IN_KUBERNETES = (
    "BackendTLSPolicy",
    "Certificate",
    "DestinationRule",
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "ServiceMonitor",
)
"""Kinds of other projects, which the schemas of Kubernetes don't have."""


def package(folder: Path) -> Path:
    """The archive; raises ValueError or a HelmError for a chart that is not to be published."""
    for name in ("default", *EXAMPLES):
        report = helm.lint(CHART, values_of(name), strict=True)
        if report["errors"]:
            raise ValueError(f"{name}: {report['errors']}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(CHART, Path(place, CHART.name)))
        with (copy / "Chart.yaml").open("a", encoding="utf-8") as about:
            yaml.safe_dump(of_chart(), about)
        archive = Path(helm.package(copy, destination=folder))
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    if archive.name != f"{metadata['name']}-{metadata['version']}.tgz":
        raise ValueError(f"{archive.name} is not named after the chart and its version")
    with tarfile.open(archive) as opened:
        if strange := [one for one in opened.getnames() if not one.startswith("kvroute/")]:
            raise ValueError(f"{archive.name} has files outside of kvroute/: {strange}")
    with helm.Chart.load(archive) as chart:
        for name in ("default", *EXAMPLES):
            for document in Rendered(chart, values_of(name)).by_template.values():
                if document["kind"] not in NOT_IN_KUBERNETES:
                    kubernetes_validate.validate(
                        document, kubernetes_validate.latest_version(), strict=True
                    )
    return archive


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("dist")
    sys.stdout.write(f"{package(folder)}\n")


if __name__ == "__main__":
    main()
