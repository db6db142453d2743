"""Which prefixes are worth a copy on another worker. Effects out. Pure."""
