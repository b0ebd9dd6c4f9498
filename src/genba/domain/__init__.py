"""The rules: pure values and functions, without I/O."""
