"""Jobs in the database."""
