"""Load documents of real engines, as tests/golden has them."""

from pathlib import Path

VLLM = Path(__file__).parents[1] / "golden" / "vllm-0.32.0"
SGLANG = Path(__file__).parents[1] / "golden" / "sglang-0.5.23" / "server-single"

VLLM_PAGE = (VLLM / "single-int" / "metrics-under-load.txt").read_text()
VLLM_DP_PAGE = (VLLM / "dp2-connect" / "metrics-under-load.txt").read_text()
SGLANG_PAGE = (SGLANG / "metrics-under-load.txt").read_text()
SGLANG_LOADS = (SGLANG / "loads-under-load.json").read_text()
