"""Child processes that render, and the frames between them and their parent."""
