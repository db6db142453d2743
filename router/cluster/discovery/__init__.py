"""Discovery of engines: watches their pods through Kubernetes' API."""
