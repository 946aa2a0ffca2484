"""Training of heads (not yet)."""
