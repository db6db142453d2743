"""The commands that the simulator adds to `kvroute`: replay, capacity, simulate, demo."""
