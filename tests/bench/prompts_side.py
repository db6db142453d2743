"""What transformers' apply_chat_template takes for the body on standard input: median CPU ms.

Runs in an environment of its own. usage: prompts_side.py TOKENIZER_FOLDER
"""

import json
import sys
import time
from statistics import median

from transformers import AutoTokenizer

REPEATS = 5


def main(folder: str, body: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return median(_cpu_ms(tokenizer, body) for _ in range(REPEATS))


def _cpu_ms(tokenizer: AutoTokenizer, body: str) -> float:
    started = time.process_time()
    read = json.loads(body)
    tokenizer.apply_chat_template(
        read["messages"], tools=read["tools"], add_generation_prompt=True, return_dict=False
    )
    return (time.process_time() - started) * 1e3


if __name__ == "__main__":
    print(main(sys.argv[1], sys.stdin.read()))  # noqa: T201
