"""Is it right on this machine? Each module is a script of its own."""
