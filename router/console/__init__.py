"""What an operator sees in a browser. Reads the state, and changes nothing."""
