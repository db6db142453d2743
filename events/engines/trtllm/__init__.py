"""TensorRT-LLM: its record, the decoder of its KV events, and its pages of load and identity."""
