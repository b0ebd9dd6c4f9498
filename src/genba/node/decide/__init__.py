"""What a node decides: pure."""
