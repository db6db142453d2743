"""Where decode engines find a prefill engine: the address of its bootstrap server. Pure."""

from urllib.parse import urlsplit

BOOTSTRAP_PORT = 8998
"""--disaggregation-bootstrap-port of SGLang, and VLLM_MOONCAKE_BOOTSTRAP_PORT, unless changed."""
MOONCAKE = "MooncakeConnector"
"""vLLM's connector that has such a server, too."""


def host_of(address: str) -> str:
    """The host of host:port or of a URL; empty where there is none."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:  # brackets that hold no IPv6 address
        return ""


def bootstrap_url(host: str, port: int) -> str:
    """port: 0 is the default."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port or BOOTSTRAP_PORT}"
