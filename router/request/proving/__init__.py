"""Comparison of the router's tokens with engines': test bodies (canaries), and the results."""
