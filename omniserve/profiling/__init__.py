"""Measure what a latency model needs: the engine's own modules, and whole steps, on this device.

Modules run as in a step, through all layers in turn, each with its own weights and cache: what is measured is what a
step finds in its caches. Everything is measured in interleaved rounds, so that a slow second of the machine spoils
one sample of many points and not all samples of one; times are lower quartiles, as disturbances only add.
"""

from omniserve.engine.fingerprint import fingerprint_of
from omniserve.profiling.loads import Arrival, mixed_load
from omniserve.profiling.measure import find_or_make_profile, profile_model
from omniserve.profiling.steps import measure_steps

__all__ = ["Arrival", "find_or_make_profile", "fingerprint_of", "measure_steps", "mixed_load", "profile_model"]
