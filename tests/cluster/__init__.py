"""A real Kubernetes on this machine, and the chart installed on it: `make cluster` (README.md)."""
