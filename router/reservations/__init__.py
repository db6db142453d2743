"""What this replica has promised: open requests, their load, sessions. Pure."""
