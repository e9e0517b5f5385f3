"""Attacks on the server: what tests/server/test_attack_*.py and ``python -m tests.server.attack`` share."""
