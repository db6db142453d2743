"""What is known of the workers, as one table with one writer, the core. Pure."""
