"""Executes a plan: the inputs of a step, its pass through the layers, and the rows that piggyback on it."""
