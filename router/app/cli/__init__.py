"""Parts that all `kvroute` commands share. Imports no simulator: its commands come by the entry
points `kvroute.commands`."""
