"""Options of jobs and policies of tasks: parsed, checked and merged."""
