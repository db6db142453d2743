"""The bootstrap server of a prefill engine, by which decode engines get its KV caches. Pure."""

from urllib.parse import urlsplit

BOOTSTRAP_PORT = 8998
"""Default of SGLang's --disaggregation-bootstrap-port, and of VLLM_MOONCAKE_BOOTSTRAP_PORT."""
MOONCAKE = "MooncakeConnector"
"""vLLM's connector that has a bootstrap server, too."""


def host_of(address: str) -> str:
    """The host in host:port or in a URL; empty if there is none."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:  # brackets that hold no IPv6 address
        return ""


def bootstrap_url(host: str, port: int) -> str:
    """The URL of a bootstrap server; port 0: BOOTSTRAP_PORT."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port or BOOTSTRAP_PORT}"
