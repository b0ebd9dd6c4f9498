"""Slots of limits, and the queues in front of them."""
