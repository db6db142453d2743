"""Authentication of callers: keys, certificates, and ports that serve callers without keys.

Law: a listener that others than this machine's users can reach serves no caller without a key,
unless that listener's switch allows it; liveness, readiness and metrics need no key.
"""
