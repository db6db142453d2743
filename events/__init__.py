"""The path of facts: from the bytes of engines' KV events to ordered, typed facts in routers.

The relay runs on the engine's side, the feed in the router.
"""
