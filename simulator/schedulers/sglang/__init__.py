"""SGLang's scheduler, step by step. Pure."""
