"""The HTTP face: OpenAI's and Anthropic's requests in, one worker's answer out."""
