"""Hot prefixes: decides which to copy to which workers, and returns effects. Pure."""
