"""Executes a plan: the inputs of a step, its layers, and the piggyback rows in it."""
