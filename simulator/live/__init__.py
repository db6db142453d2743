"""Engines that speak real ZMQ and HTTP, on a clock."""
