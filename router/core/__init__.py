"""The one writer of fleet and reservations, and the native fast path beside it. Pure."""
