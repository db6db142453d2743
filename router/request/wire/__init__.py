"""Reads sizes and fields of raw gRPC messages without protobuf's objects. Pure."""
