"""The archive that a registry gets."""

import tarfile
from pathlib import Path

import helm_python as helm
import yaml

from tests.distribution.project import of_chart
from tests.helm.package import package
from tests.helm.rendered import CHART, Rendered, values_of


def test_the_archive_is_the_chart(tmp_path: Path, chart: helm.Chart) -> None:
    archive = package(tmp_path)
    with tarfile.open(archive) as opened:
        names = {name.removeprefix("kvroute/") for name in opened.getnames()}
        about = opened.extractfile("kvroute/Chart.yaml")
        assert about is not None
        assert of_chart().items() <= yaml.safe_load(about).items()
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "README.md"} <= names
    assert {f"templates/{path.name}" for path in (CHART / "templates").iterdir()} <= names
    assert "dashboards/kvroute.json" in names
    with helm.Chart.load(archive) as packed:
        values = values_of("small-fleet")
        assert set(Rendered(packed, values).by_template) == set(Rendered(chart, values).by_template)
