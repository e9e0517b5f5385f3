"""A client that loads a server through its API and tells how long answers took; it needs no torch."""
