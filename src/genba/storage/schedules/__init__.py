"""Schedules in the database."""
