"""Values of the contract: prompts, options, picks, usage, and their bytes. Opens nothing."""
