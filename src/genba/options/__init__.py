"""Options of jobs and tasks: read, checked and merged."""
