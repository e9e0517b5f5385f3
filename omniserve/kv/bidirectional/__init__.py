"""``bidirectional``: an LS and a BE request may share a device block, one from the left, the other from the right.

A direction table tells attention from which side a block runs (``AttentionMetadata.reversed_RM``).

Paper: bros 5.1 (block structure), 5.2 (allocation and preemption, lazy checkpointing), 6 (direction table).

A block holds tokens of one LS request in its slots from 0 upward, and of one BE request from the last slot downward.
As a block table has a block for every ``block_size`` tokens, it is the last block of either request that can be shared.
Three things happen to a BE request's blocks:

* While it is *on the device*, an LS request that finds no free block moves into the empty slots of its last one.
  Neither request overwrites the other: when one of them outgrows the block, its tokens there are copied into another
  block before the step (``take_relocations``), and it goes on in that one.
* While it is *evicted* (preempted, but its KV is still there), LS requests take its blocks, those with the most empty
  slots first. An LS request takes its last block from the left only, and overwrites the BE request's tokens in it slot
  by slot. An evicted request loses its tokens from the end on, so what is left on the device is always a prefix.
* KV that is about to be overwritten is first copied to the host, if there is time (``start_saving``): blocks that an LS
  request is about to fill, and blocks that are next to be taken. When the request resumes, what the device has lost is
  copied back if the host has it; the rest is recomputed.

Where this departs from the paper, and why:

* An LS request is never overwritten, so it never has to be copied back.
* In the paper any BE request can be overwritten, and then sits out the step. Here only evicted ones can. The scheduler
  decides which requests are evicted, as with every manager; a request that has lost no block resumes at no cost.
* Copies to the host run beside the steps, and never delay one. So a slot is checkpointed if it lies less than
  ``_SLOTS_AHEAD`` slots before the LS request, and a block if it is among the first in line (``checkpoint_blocks`` of
  them); what an LS prompt takes at once beyond that is recomputed. Whole blocks are copied; how many of their tokens
  count is kept beside them.
* A BE request's blocks are whole ones (FindBlock would also put a prompt's tail beside an LS request).
* Host blocks run from the left, so that the host tier can attend to them: copies reverse the blocks of BE requests.
"""

from omniserve.kv.bidirectional.manager import BidirectionalKVManager

__all__ = ["BidirectionalKVManager"]
