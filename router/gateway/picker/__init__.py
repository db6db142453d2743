"""Envoy's endpoint picker: an HTTP request in steps of ext_proc, and the worker that serves it."""
