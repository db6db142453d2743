"""Engines that the router finds by itself: pods, watched at Kubernetes' API."""
