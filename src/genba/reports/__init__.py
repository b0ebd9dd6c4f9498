"""Read-only answers about jobs and installations."""
