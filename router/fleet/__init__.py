"""All that a router knows of its workers, in one table that only the decision core writes. Pure."""
