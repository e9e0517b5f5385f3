"""The version of OmniServe."""

__version__ = "0.1.0"
