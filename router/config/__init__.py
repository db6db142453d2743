"""Settings: frozen structures, and where they come from. Only `reading` reads files and the
environment."""
