"""Knowledge of the workers, as one table with one writer, the core. Pure."""
