"""Envoy's endpoint picker: picks a worker for each HTTP request that Envoy shows by ext_proc."""
