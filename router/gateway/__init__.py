"""The HTTP gateway: takes requests of OpenAI's and Anthropic's APIs, and returns a worker's
answer.
"""
