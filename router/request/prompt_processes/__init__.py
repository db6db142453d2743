"""Child processes that render prompts, and the messages (frames) between them and their parent."""
