"""Envoy's endpoint picker: picks a worker for each HTTP request that Envoy shows by ext_proc.

"Envoy" stands for every proxy of docs/envoy.md that calls it by ext_proc.
"""
