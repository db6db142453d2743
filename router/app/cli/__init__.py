"""The `kvroute` command. Knows no simulator: see the entry points `kvroute.commands`."""
