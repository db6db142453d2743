"""Engines by name: which requests a step computes, after each engine's own scheduler."""
