"""Place: which part of a model a rank has.

Ranks are counted by stages: with a tensor-parallel size of t, t consecutive ones share each stage. Rank 0 is in the
*last* stage: it schedules and samples, and tokens are sampled behind the last layer. So the first stage is that of rank
t, and rows go from there through the ranks above, and then to rank 0's stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from omniserve.core.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among the others."""

    rank: int
    num_shards: int
    """Ranks of a stage."""
    num_stages: int

    @classmethod
    def of(cls, rank: int, config: ParallelConfig) -> Place:
        """Return the place of a rank."""
        return cls(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def shard(self) -> int:
        """The rank's part of each layer, as an index."""
        return self.rank % self.num_shards

    @property
    def stage(self) -> int:
        """The rank's stage, in the order of the layers, as an index."""
        return (self.rank // self.num_shards - 1) % self.num_stages

    @property
    def before(self) -> int | None:
        """The rank from which rows come; None: it is in the first stage."""
        return None if self.stage == 0 else self._rank_in(self.stage - 1)

    @property
    def behind(self) -> int | None:
        """The rank to which rows go; None: it is in the last stage."""
        return None if self.stage == self.num_stages - 1 else self._rank_in(self.stage + 1)

    def _rank_in(self, stage: int) -> int:
        return (stage + 1) % self.num_stages * self.num_shards + self.shard

    def layers(self, num_layers: int) -> range:
        """Return the layers of its stage: equal parts, the first stages have one more if they must.

        The last stage has the head, too.

        Raises:
            ValueError: There are fewer layers than stages.
        """
        if num_layers < self.num_stages:
            raise ValueError(
                f"the model has {num_layers} layers with attention, too few for {self.num_stages} stages: give a "
                f"pipeline_parallel_size of at most {num_layers}"
            )
        begin, end = (-(-num_layers * stage // self.num_stages) for stage in (self.stage, self.stage + 1))
        return range(begin, end)
