"""Nodes in the database: alive, dead, taken over."""
