"""Requests, and the reasons for refusals. Pure; knows no gRPC."""
