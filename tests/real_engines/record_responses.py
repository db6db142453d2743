"""Captures the chats that SGLang's converter makes of responses, which no endpoint of it shows.

usage: python -m tests.real_engines.record_responses [--build build/real-engines]

Needs the installation of `make real-engines`; no engine runs. Rewrites tests/router/request/
converted/sglang-responses.json: of each body of tests/stage/prompts/responses.py the chat for a
template that loses a later system message, and the one for a template that shows it.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

from tests.stage.prompts.captures import write_cases
from tests.stage.prompts.responses import RESPONSES

GOLDEN = Path(__file__).resolve().parents[1] / "router/request/converted/sglang-responses.json"
INSIDE = """
import json, sys, types
from sglang import __version__
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses as Serving

def chat_of(body, inline):
    request = ResponsesRequest(**body)
    serving = types.SimpleNamespace(
        supports_inline_system=inline,
        tool_call_parser=None,
        _normalize_response_message_for_chat=Serving._normalize_response_message_for_chat,
        _merge_consecutive_assistant_messages=Serving._merge_consecutive_assistant_messages,
    )
    serving._response_input_history = lambda of: Serving._response_input_history(serving, of)
    messages = Serving._construct_input_messages(serving, request)
    tools = Serving._response_tools_to_chat_tools(serving, request)
    choice = Serving._chat_tool_choice(request.effective_tool_choice()) if tools else "none"
    return {
        "messages": messages,
        "tools": [tool.model_dump(exclude_none=True) for tool in tools] or None,
        "tool_choice": choice,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }

bodies = json.load(sys.stdin)
cases = {name: [chat_of(body, inline) for inline in (False, True)] for name, body in bodies.items()}
print(json.dumps({"engine": f"sglang {__version__}", "cases": cases}))
"""
"""Run by SGLang's own Python: its classes without a server around them."""


def main(build: Path) -> None:
    python = build / "sglang-venv/bin/python"
    done = subprocess.run(
        [python, "-c", INSIDE],
        input=json.dumps(RESPONSES),
        stdout=subprocess.PIPE,
        env=os.environ | {"SGL_STUB": "1"},
        text=True,
        check=True,
    )
    golden = json.loads(done.stdout.splitlines()[-1])
    write_cases(GOLDEN, golden["engine"], golden["cases"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, default=Path("build/real-engines"))
    main(parser.parse_args().build)
