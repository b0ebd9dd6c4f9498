"""What a node observes and reports."""
