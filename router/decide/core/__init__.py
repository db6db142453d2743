"""The decision core, the one writer of the fleet's state and of reservations. Pure."""
