"""Profiles and steps of a made-up machine whose times are known exactly."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from omniserve.latency import BatchFeatures, ModelShape, Profile, StepSample
from omniserve.latency.features import AlphaBeta
from omniserve.latency.profile import STATES, Fingerprint

LAYERS = 4
SHAPE = ModelShape(num_layers=LAYERS, windows=((0, 4),))
# Slower where the cores are shared.
FACTOR = dict(zip(STATES, (1.0, 1.8), strict=True))

FINGERPRINT = Fingerprint(
    model="a-model", dtype="bfloat16", device="a device", device_threads=2, shared_threads=1, host_threads=1,
    host_kv_dtype="auto", block_size=16, attention="auto", compile=True, torch="2", extension="0 x", kernels="",
)  # fmt: skip


def dense_s(rows: float) -> float:
    """A layer's halves: a flat part, then a slope."""
    return 1e-3 + 2e-5 * max(0.0, rows - 16)


def prefill_s(chunk: int, context: int) -> float:
    return 1e-8 * SHAPE.keys_seen(context, chunk) + 2e-7 * chunk + 1e-5


def decode_s(requests: int, context: int) -> float:
    return 3e-8 * context + 1e-6 * requests + 1e-5


def make_profile(steps: tuple[StepSample, ...] = ()) -> Profile:
    """Return what profiling that machine gives."""
    rows = (1, 16, 64, 256, 544)
    return Profile(
        fingerprint=FINGERPRINT,
        shape=SHAPE,
        seconds=1.0,
        dense={s: tuple((n, FACTOR[s] * dense_s(n)) for n in rows) for s in STATES},
        head={s: tuple((n, FACTOR[s] * (1e-4 + 1e-5 * n)) for n in rows) for s in STATES},
        prefill_attention={
            s: tuple((c, k, FACTOR[s] * prefill_s(c, k)) for c in (8, 64, 512) for k in (0, 128, 1024)) for s in STATES
        },
        decode_attention={
            s: tuple((r, r * k, FACTOR[s] * decode_s(r, r * k)) for r in (1, 8, 64) for k in (16, 128, 1024))
            for s in STATES
        },
        piggyback=tuple((p, r, 1e-5 + 1e-7 * p + 1e-6 * r) for p in (1, 8, 32) for r in (0, 1, p) if (p, r) != (1, 0)),
        host_attention=tuple(
            (r, r * k, t, (1e-8 * r * k + 1e-6 * r) / t + 3e-5) for r in (1, 8) for k in (64, 512) for t in (1, 2)
        ),
        host_drafts=tuple(
            (r, r * k, 3, 2, (1e-8 * r * k + 4e-9 * 3 * r * k + 1e-6 * r) / 2 + 3e-5) for r in (1, 8) for k in (64, 512)
        ),
        copy_to_host=AlphaBeta(alpha_s=1e-4, beta_s=1e-10),
        copy_to_device=AlphaBeta(alpha_s=2e-4, beta_s=2e-10),
        steps=steps,
    )


def with_chunk(shape: ModelShape, features: BatchFeatures, start: int, count: int, *, samples: bool) -> BatchFeatures:
    """Return the features with one more device chunk: rows at positions ``[start, start + count)``, count >= 1."""
    decodes, load = count == 1, shape.keys_seen(start, count)
    return dataclasses.replace(
        features,
        prefill_requests=features.prefill_requests + (not decodes),
        prefill_tokens=features.prefill_tokens + (0 if decodes else count),
        prefill_context=features.prefill_context + (0 if decodes else start),
        prefill_load=features.prefill_load + (0.0 if decodes else load),
        decode_requests=features.decode_requests + decodes,
        decode_context=features.decode_context + (start if decodes else 0),
        decode_load=features.decode_load + (load if decodes else 0.0),
        sampled_rows=features.sampled_rows + samples,
        dense_layers=shape.num_layers,
    )


def draw_features(rng: random.Random) -> BatchFeatures:
    """Draw a step: some decodes, maybe a chunk, maybe seats."""
    seats = rng.choice((0, 0, 8, 32))
    rows = rng.randint(1, seats * LAYERS) if seats else 0
    features = BatchFeatures(
        seats=seats, piggyback_rows=rows, piggyback_layers=min(rows, LAYERS), host_works=seats > 0 or rng.random() < 0.3
    )
    for _ in range(rng.randint(0, 20)):
        features = with_chunk(SHAPE, features, rng.randint(0, 1000), 1, samples=True)
    if rng.random() < 0.5 or not features.device_rows:
        features = with_chunk(SHAPE, features, rng.randint(0, 500), rng.randint(2, 300), samples=rng.random() < 0.5)
    return features


def draw_steps(
    seed: int, count: int, seconds: Callable[[BatchFeatures], float], noise: float = 0.0
) -> list[StepSample]:
    """Measure ``count`` drawn steps on a machine that takes ``seconds``, give or take a share of ``noise``."""
    rng = random.Random(seed)
    drawn = [draw_features(rng) for _ in range(count)]
    return [StepSample(features=f, seconds=seconds(f) * (1 + rng.uniform(-noise, noise))) for f in drawn]
