"""The threads of a node that talk to the database."""
