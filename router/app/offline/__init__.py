"""Commands that call no router: they read files and print."""
