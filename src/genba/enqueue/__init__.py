"""From a call to a row."""
