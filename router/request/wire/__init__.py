"""Sizes and fields of raw gRPC messages, looked at before protobuf builds objects. Pure."""
