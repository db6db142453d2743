"""One release of the chart, as Helm would install it."""

from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from router.config.reading import load
from router.config.settings.configurations import ServeConfig

CHART = Path(__file__).parents[2] / "helm" / "kvroute"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))

Object = dict[str, Any]


class Rendered:
    """One release as Helm would install it: objects by template, and the notes."""

    def __init__(self, chart: helm.Chart, values: dict[str, Any]) -> None:
        self.values = {**yaml.safe_load((CHART / "values.yaml").read_text()), **values}
        """At the top level: those of the chart, and over them the given ones."""
        texts = chart.render(values, name="demo", namespace="inference")
        self.notes = texts.pop("kvroute/templates/NOTES.txt")
        self.by_template: dict[str, Object] = {}
        for path, text in texts.items():
            documents = [document for document in yaml.safe_load_all(text) if document]
            if documents:
                (document,) = documents  # one object a template
                self.by_template[path.removeprefix("kvroute/templates/")] = document

    def __getitem__(self, template: str) -> Object:
        return self.by_template[template]

    def __contains__(self, template: str) -> bool:
        return template in self.by_template

    @property
    def pod(self) -> Object:
        return self["deployment.yaml"]["spec"]["template"]

    @property
    def router(self) -> Object:
        (container,) = self.pod["spec"]["containers"]
        return container

    @property
    def relay(self) -> Object:
        (container,) = self["example-engine.yaml"]["spec"]["template"]["spec"]["initContainers"]
        return container

    @property
    def config_text(self) -> str:
        return self["configmap.yaml"]["data"]["config.yaml"]

    @property
    def checksum(self) -> str:
        return self.pod["metadata"]["annotations"]["checksum/config"]


def values_of(name: str) -> dict[str, Any]:
    if name == "default":
        return {}
    return helm.values_from_yaml((CHART / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))


def program_config(rendered: Rendered, folder: Path, **environment: str) -> ServeConfig:
    """The rendered file as `kvroute serve` would load it."""
    file = folder / "config.yaml"
    file.write_text(rendered.config_text, encoding="utf-8")
    return load(ServeConfig, file, environment, {})
