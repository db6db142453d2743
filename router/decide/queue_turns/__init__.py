"""Whose turn it is: bands, tenants' shares, siblings, pools and rounds over them. Pure."""
