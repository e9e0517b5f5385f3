"""Who may use a server, for how much: API keys, limits, tiers, origins of web pages."""
