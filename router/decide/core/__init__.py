"""The one writer of fleet and reservations. Pure."""
