"""How far below its objective a predicted TTFT must lie for a request to be admitted."""

from __future__ import annotations

FIRST_MARGIN, LEAST_MARGIN, LARGEST_MARGIN = 0.2, 0.1, 0.5
MISSES_AIMED_AT = 0.03
"""Share of the admitted requests that may miss their TTFT."""
_GAIN = 0.08
_CLOSE = 0.5  # requests predicted to take less of their TTFT than this say nothing of the margin


class AdmissionMargin:
    """The share of a TTFT that admission control leaves; it learns from those that were admitted.

    No model knows which requests arrive next, or how a busy machine slows down. So errors are measured:
    a miss raises the margin, a kept objective lowers it a little, and the two balance where ``MISSES_AIMED_AT`` of the
    admitted miss (adaptive conformal inference, Gibbs and Candes 2021, equation 2).
    """

    def __init__(self) -> None:
        self.share = FIRST_MARGIN

    def learn(self, *, predicted_s: float, actual_s: float, required_s: float) -> None:
        """Take note of one admitted request's first token.

        Args:
            predicted_s: Soonest TTFT that was predicted when it was admitted, seconds.
            actual_s: What it was.
            required_s: Its objective.
        """
        if predicted_s < _CLOSE * (1 - self.share) * required_s:
            return
        missed = float(actual_s > required_s)
        share = self.share + _GAIN * (missed - MISSES_AIMED_AT)
        self.share = min(max(share, LEAST_MARGIN), LARGEST_MARGIN)
