"""Servers of other engines beside OmniServe's on the CPU: see ``__main__``."""
