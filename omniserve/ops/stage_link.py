"""StageLink: the rows of steps on their way from a stage of a pipeline to the next one.

Both ends know the plan of each step, and so how many rows and flags come. They go through torch.distributed: NCCL
between GPUs, gloo between CPUs. Legend: T rows, D columns of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StageLink:
    """A rank's connections to the stages before and behind its own.

    Args:
        group: A process group of torch.distributed with all ranks; None: there is one stage.
        before: The rank whose rows come here; None: this stage is the first.
        behind: The rank that gets this one's; None: this stage is the last.
        width: D.
        most_under_way: Number of sends that are kept until they are waited for: more than the steps in flight have, so
            that the oldest one has been received by then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        before: int | None = None,
        behind: int | None = None,
        width: int = 0,
        most_under_way: int = 2,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._group, self._before, self._behind = group, before, behind
        self._width, self._dtype, self._device = width, dtype, device
        self._most_under_way = most_under_way
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    @property
    def is_first(self) -> bool:
        """Steps begin here: with token ids, not with rows."""
        return self._before is None

    @property
    def is_last(self) -> bool:
        """Steps end here: rows become logits."""
        return self._behind is None

    def receive(self, num_rows: int) -> Tensor:
        """Return the rows ``[T, D]`` of the next step from the stage before; a CPU waits for them, a GPU's stream does.

        Raises:
            RuntimeError: The rows do not come in time, or the rank is gone.
        """
        assert self._group is not None and self._before is not None
        rows_TD = torch.empty(num_rows, self._width, dtype=self._dtype, device=self._device)
        self._group.recv([rows_TD], self._before, 0).wait()
        return rows_TD

    def receive_flags(self, count: int) -> list[bool]:
        """Return the flags of the next step from the stage before, which come behind its rows; on a CPU.

        Raises:
            RuntimeError: As ``receive``.
        """
        assert self._group is not None and self._before is not None
        flags = torch.empty(count, dtype=torch.uint8)
        self._group.recv([flags], self._before, 0).wait()
        return flags.bool().tolist()

    def send_flags(self, flags: Sequence[bool]) -> None:
        """Send a step's flags, at least one, to the stage behind, if there is one, behind its rows; on a CPU.

        Raises:
            RuntimeError: The rank is gone.
        """
        self._send(torch.tensor(flags, dtype=torch.uint8))

    def pass_on(self, num_rows: int) -> None:
        """Let rows of any value pass this stage, to measure that; wait for them.

        Raises:
            RuntimeError: As ``receive`` and ``send``.
        """
        if self.is_first:
            rows_TD = torch.zeros(num_rows, self._width, dtype=self._dtype, device=self._device)
        else:
            rows_TD = self.receive(num_rows)
        self.send(rows_TD)
        if rows_TD.device.type == "cuda":
            torch.cuda.synchronize(rows_TD.device)

    def send(self, rows_TD: Tensor) -> None:
        """Send a step's rows to the stage behind, if there is one. Nothing may write to them later.

        A CPU waits for no receiver, as long as no more steps are in flight than there are stages. A GPU's stream does:
        what is launched behind this begins when the rows have gone.

        Raises:
            RuntimeError: The rank is gone.
        """
        self._send(rows_TD.contiguous())

    def _send(self, tensor: Tensor) -> None:
        if self._behind is None:
            return
        assert self._group is not None
        work = self._group.send([tensor], self._behind, 0)
        if tensor.device.type != "cpu":
            work.wait()  # the stream does; the memory is reused in its order
            return
        self._under_way.append((work, tensor))
        while len(self._under_way) > self._most_under_way:  # gloo tells only in wait() that a send is over
            self._under_way.popleft()[0].wait()
