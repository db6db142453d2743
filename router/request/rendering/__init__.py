"""One body to tokens, in this process: body, template, encoder. Reads the tokenizer's folder."""
