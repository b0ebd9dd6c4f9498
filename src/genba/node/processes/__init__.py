"""The processes below a node."""
