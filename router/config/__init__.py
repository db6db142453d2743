"""Settings: frozen structures, and where they come from. Only `settings` reads files and the
environment."""
