"""A profile as text, for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from omniserve.latency import LATENCY_MODELS, Accuracy, Profile, accuracy_of
from omniserve.latency.omniserve import Curve
from omniserve.latency.profile import STATES

_ROWS = (1, 4, 16, 64, 256, 1024)
_LEAST_STEPS = 20


def summarise(profile: Profile) -> str:
    """Return a few lines: what was measured, on what, and how well models made of it predict the measured steps."""
    return "\n".join(_lines(profile))


def _lines(profile: Profile) -> Iterator[str]:
    mark = profile.fingerprint
    threads = f"{mark.device_threads} threads alone, {mark.shared_threads} beside {mark.host_threads} of the host tier"
    yield f"device     {mark.device} ({threads}), {mark.dtype}, torch {mark.torch}"
    yield f"model      {profile.shape.num_layers} layers, configuration {mark.model}, fingerprint {mark.key}"
    most = max(rows for rows, _ in profile.dense[STATES[0]])
    sizes = [*(rows for rows in _ROWS if rows < most), most]
    yield f"{'rows':<26}" + "".join(f"{rows:>9}" for rows in sizes)
    layers = profile.shape.num_layers
    # Without a GPU the states differ: then both are shown.
    states = STATES if profile.dense[STATES[0]] != profile.dense[STATES[1]] else STATES[:1]
    for state in states:
        curve = Curve(profile.dense[state])
        label = f"dense, {state} ({len(profile.dense[state])} points)"
        yield f"{label:<26}" + "".join(f"{layers * curve(rows) * 1e3:>9.3g}" for rows in sizes) + "  ms, all layers"
    head = Curve(profile.head[STATES[0]])
    yield f"{'head':<26}" + "".join(f"{head(rows) * 1e3:>9.3g}" for rows in sizes) + "  ms"
    tables = [profile.prefill_attention, profile.decode_attention]
    counts = " and ".join(str(len(table[STATES[0]])) for table in tables)
    yield f"attention  {counts} points of prefill and decode"
    if mark.host_threads:
        copies = {"to the host": profile.copy_to_host, "back": profile.copy_to_device}
        moves = [f"{1e-9 / copy.beta_s:.1f} GB/s {way}" for way, copy in copies.items() if copy.beta_s > 0]
        yield f"host tier  {len(profile.host_attention)} points of attention; moves {', '.join(moves)}"
    yield f"steps      {len(profile.steps)} whole ones; models fitted to half of them predict the others:"
    if len(profile.steps) >= _LEAST_STEPS:
        for name in LATENCY_MODELS.names():
            yield f"           {name:<10} {_held_out(profile, name)}"
    else:
        yield f"           too few to tell, fewer than {_LEAST_STEPS}; raise the time limit"
    yield f"took       {profile.seconds:.1f} s"
    if (seen := profile.conditions) is not None:
        yield (
            f"beside     {seen.others_cores:.2f} cores busy for others, {seen.waited:.0%} of the time without a core, "
            f"repeats {seen.spread:.0%} longer than the shortest"
        )


def _held_out(profile: Profile, name: str) -> Accuracy:
    half = dataclasses.replace(profile, steps=profile.steps[::2])
    return accuracy_of(LATENCY_MODELS.get(name).from_profile(half), profile.steps[1::2])
