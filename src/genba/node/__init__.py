"""The supervisor of a node and the processes below it."""
