"""Which requests may wait, how much and for how long: bounds, quotas, early refusals. Pure."""
