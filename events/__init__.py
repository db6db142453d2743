"""How facts travel: engine bytes -> ordered, typed facts. Engine side: the relay. Router side: the feed."""
