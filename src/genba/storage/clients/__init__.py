"""What client processes hold: sessions, locks, messages."""
