"""The engines of a server: each is a process of its own, which is watched, started again, and chosen for calls."""
