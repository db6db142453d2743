"""Makes a body's tokens in this process: body, template, encoder. Reads the tokenizer's folder."""
