"""A fleet, its routers and their network in virtual time, on one heap of timed calls. Pure."""
