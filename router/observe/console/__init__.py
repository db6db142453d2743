"""The console: what an operator sees of a router in a browser. Changes nothing."""
