"""From a request's body to the tokens that its engine will compute, without asking an engine."""
