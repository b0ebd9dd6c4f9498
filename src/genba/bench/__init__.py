"""`genba bench`: how fast genba is, beside the limits of the same machine."""
