"""Authentication of callers: keys, certificates, and ports that serve callers without keys.

Law: a listener that others than this machine's users can reach serves no caller without keys, but
for the switch of that listener, and liveness, readiness and metrics.
"""
