"""Access to a server: API keys, limits, tiers and the origins of web pages."""
