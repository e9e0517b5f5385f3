"""DecodeFirst: ``omniserve`` with best-effort decodes before best-effort prompts, to see what the order alone does."""

from __future__ import annotations

from omniserve.sched.batch import Batch
from omniserve.sched.omniserve import OmniServeScheduler


class DecodeFirst(OmniServeScheduler):
    """Not the paper's order (omniserve 3.3.2): BE prompts get the time that BE decodes leave."""

    def _prefill_be(self, batch: Batch, bound_s: float) -> None:
        """Wait for the decodes."""

    def _decode_be(self, batch: Batch, bound_s: float) -> None:
        super()._decode_be(batch, bound_s)
        super()._prefill_be(batch, bound_s)
