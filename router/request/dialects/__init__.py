"""How each engine turns a request's body into the input of the model's chat template. Pure."""
