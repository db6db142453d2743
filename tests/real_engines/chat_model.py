"""The tiny model with a chat template, and engines that serve it."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.real_engines.engines import Engine, Sglang, Vllm
from tests.stage.prompts.tiny_tokenizer import make_folder

CONTEXT = 16384
BLOCKS = {"vllm": 1024, "sglang": 2048}
"""Of a cache: room for two contexts."""
FLAGS: dict[str, Sequence[str]] = {
    "vllm": (
        *("--max-model-len", str(CONTEXT), "--enable-scale-out"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ),
    "sglang": (),
}
CLASSES: dict[str, type[Engine]] = {"vllm": Vllm, "sglang": Sglang}


def make_room(build: Path, room: Path, template: str) -> Path:
    """A folder that takes the place of `build` for engines, with the tests' tokenizer and this
    template in its model; returns the model's folder."""
    room.mkdir(parents=True, exist_ok=True)
    for name in ("vllm-venv", "sglang-venv", "lora"):
        (room / name).symlink_to((build / name).resolve())
    folder = make_folder(room / "model", template)
    config = json.loads((build / "model/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    generation = (build / "model/generation_config.json").read_text()
    (folder / "generation_config.json").write_text(generation)
    return folder
