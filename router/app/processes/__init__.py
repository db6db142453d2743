"""Puts the parts together, starts and stops them in order: `kvroute serve`, `kvroute relay`."""
