"""What user code holds: no SQL, no processes."""
