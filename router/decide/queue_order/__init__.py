"""Which of two waiting requests is sooner: orders by name, and keys made of them. Pure."""
