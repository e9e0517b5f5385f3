"""Plain data that every part may use: requests, plans, settings, statistics, errors. No torch."""
