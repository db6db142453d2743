"""What each engine makes of a body before the template. Pure."""
