"""From a body's bytes to its tokens: CPU time of the renderer, in this process.

The 99k chat is an agent's last turn: tools, and 199 messages of which 196 were seen before, so that
the encoder's cache holds their tokens. The 8k chat is new in every go. Contents are random words;
the tokenizer is trained on such words (8,000 ids), or KVROUTE_TOKENIZER names a model's folder.
Beside each stands transformers' apply_chat_template of the same messages, with the same files.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from router.request import bodies
from router.request.prompt_settings import RendererSettings
from router.request.rendering.renderer import Renderer
from tests.bench.environments import Missing, python_of, run
from tests.bench.timing import beside, row
from tests.stage.prompts.bodies import TOOLS
from tests.stage.prompts.captures import TEMPLATES

REPEATS = 7
VOCABULARY = 8_000
SYLLABLES = (
    "ba",
    "ko",
    "ri",
    "ten",
    "ul",
    "mes",
    "tra",
    "no",
    "vi",
    "sen",
    "dor",
    "ep",
    "al",
    "qui",
)
TRANSFORMERS = ("transformers", "transformers>=5", "jinja2>=3.1.6")


def rows() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as room:
        folder = Path(os.environ.get("KVROUTE_TOKENIZER") or tokenizer_folder(Path(room)))
        renderer = Renderer(RendererSettings(folder=str(folder)))
        turn = _Conversation(1)
        turn.grow(renderer, 99_000)
        long = turn.body(new=3)
        short = [_Conversation(seed).grow(renderer, 8_000).body() for seed in range(2, 3 + REPEATS)]
        seen = turn.body(new=0)
        bodies = iter(short)

        def later_turn() -> float:
            fresh = Renderer(RendererSettings(folder=str(folder)))
            fresh.render(bodies.CHAT, seen, "vllm")
            return _cpu_ms(fresh, long)

        def new_chat() -> float:
            return _cpu_ms(renderer, next(bodies))

        return [
            _compared("prompt_99k_turn_cpu_ms", later_turn, folder, long),
            _compared("prompt_8k_new_cpu_ms", new_chat, folder, short[-1]),
        ]


def _compared(name: str, measure: Callable[[], float], folder: Path, body: bytes) -> dict[str, Any]:
    ours = row(name, round(median(measure() for _ in range(REPEATS)), 2), "ms", "less")
    try:
        return beside(ours, _transformers_ms(folder, body))
    except Missing as missing:
        return ours | {"note": str(missing)}


def _cpu_ms(renderer: Renderer, body: bytes) -> float:
    started = time.process_time()
    renderer.render(bodies.CHAT, body, "vllm")
    return (time.process_time() - started) * 1e3


def _transformers_ms(folder: Path, body: bytes) -> float:
    """CPU of transformers for the same body, read with json; raises Missing."""
    side = Path(__file__).with_name("prompts_side.py")
    return float(run(str(python_of(*TRANSFORMERS)), str(side), str(folder), said=body.decode()))


class _Conversation:
    """An agent's chat, which grows."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._words = _words()
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._text(400)},
        ]

    def grow(self, renderer: Renderer, tokens: int) -> "_Conversation":
        """Adds turns until the chat has this many tokens."""
        size = 0
        while size < tokens:
            for _ in range(2 if size else 1):
                self._messages += [
                    {"role": "user", "content": self._text(300)},
                    {"role": "assistant", "content": self._text(700)},
                ]
            size = renderer.render(bodies.CHAT, self.body(), "vllm").count
        return self

    def body(self, new: int = 0) -> bytes:
        """new: messages that it gets in addition, and keeps."""
        for _ in range(new):
            self._messages.append({"role": "user", "content": self._text(300)})
        result = {"model": "m", "messages": self._messages, "tools": TOOLS, "tool_choice": "auto"}
        return json.dumps(result).encode()

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(self._words, k=words)) + ".\n"


def _words() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(4_000)]


def tokenizer_folder(room: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_words()) + json.dumps(TOOLS)], trainer)
    tokenizer.save(str(room / "tokenizer.json"))
    (room / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (room / "tokenizer_config.json").write_text(json.dumps(config))
    return room
