"""Messages as they were received, bounded and read: see received.pyx."""

from typing import Any

OTHER_FIELDS_MAX: int
TOKEN_IDS: int
TOKEN_BYTES: int
BLOCK_HASHES: int
ESTIMATED_TOKENS: int

class TooMuch(ValueError):
    what: str
    """What is over its bound: fields, bytes, tokens or items."""
    def __init__(self, what: str) -> None: ...

class ReceivedRequest:
    """A RouteRequest, read of a message (read_request) or made by this process
    (request_of); its fields by their names in the contract. len() is its size in bytes."""

    form: int
    """The number of the prompt's field: TOKEN_IDS, TOKEN_BYTES, BLOCK_HASHES, ESTIMATED_TOKENS;
    another one: a text or a body; 0: there is none."""
    data: bytes | memoryview
    """The prompt: tokens (little-endian u32), hashes (little-endian u64), a text or a body. A part
    of the message, which it keeps alive, where the form is TOKEN_BYTES."""
    block_size: int
    """Tokens of a block of BLOCK_HASHES; 0: another form."""
    prompt_tokens: int
    """Length of the prompt, known with BLOCK_HASHES, ESTIMATED_TOKENS and `made`."""
    made: Any
    """Tokens of a text or a body, or the estimate of its length (PromptTokens); None: not made
    yet."""
    request_id: str
    model: str
    lora_name: str
    cache_salt: str
    tenant: str
    session_id: str
    policy: str
    traceparent: str
    expected_output_tokens: int | None
    ttft_slo_ms: int | None
    tpot_slo_ms: int | None
    queue_timeout_ms: int | None
    priority: int
    phase: int
    waited_ms: int
    charged_tokens: int
    omit_receipt: bool
    return_tokens: bool
    require_tokens: bool
    queue_progress: bool
    observed: bool
    required_labels: dict[str, str] | None
    excluded_labels: dict[str, str] | None
    allowed_worker_ids: list[str] | None
    excluded_worker_ids: list[str] | None
    multimodal_items: list[bytes] | None
    """The bytes of each MultimodalItem; None, here and above: not set."""
    longest: int
    """Bytes of the longest field beside the prompt."""
    entries: int
    """Number of entries of all lists and maps."""
    size: int
    def __len__(self) -> int: ...

def read_request(
    content: bytes, fields_max: int, bytes_max: int, tokens_max: int
) -> ReceivedRequest: ...
def request_of(form: int, data: bytes, fields: dict[str, Any]) -> ReceivedRequest: ...
def text_form(message: bytes | ReceivedRequest) -> int: ...
def check_fields(content: bytes, most: int) -> None: ...

class Pieces:
    def __init__(self, content: bytes, number: int, most: int) -> None: ...
    def __len__(self) -> int: ...
    def take(self, count: int) -> list[bytes]: ...
