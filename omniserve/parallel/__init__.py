"""Several processes that serve one model: the ranks of tensor and pipeline parallelism.

Rank 0 is the engine's process, with the scheduler and the sampler. The other ranks are told each plan and run the same
``ModelRunner``, each with its part of the weights and of the KV heads, and with a host tier for these.

**Ranks** (``tensor_parallel_size``) take the same way through a step. A model is sharded in place before it is patched
(``layers/weights/sharding.py``), so that ``patch`` finds a model with fewer heads; all else of a rank is as in one
process: its runner, its KV pools, its host tier. A rank reads its part of the checkpoint alone
(``layers/weights/parts.py``). What the plan does not decide, rank 0 does, and the others are told
(``runner/rank_broadcast.py``): which late results have come, which rows leave between layers, which rows of a second
sub-batch were lost, whether another graph is captured. A host event counts when every rank has told it. A rank that is
lost ends the engine.

**Stages** (``pipeline_parallel_size``) have a step each. A rank traces the whole model and keeps the layers of its
stage (``patched_model(keep=...)``); layers, joins and host events keep their numbers in the model. Rank 0 is in the
last stage: it tells all ranks a plan when it launches a step, and runs its own layers and the head when it collects
it (``LastStageRunner``). Rows go from stage to stage by ``ops/stage_link.py``; both ends know from the plan how many.
As many steps are in flight as there are stages (``Stepper``), all of them advanced before they are known.

A request that one of these steps samples for is in no other one until that is settled, and decodes are dealt out evenly
to the steps in flight (``sched/stages.py``). Every rank is given plans in the same order, so cancels, moves and blocks
that change hands need no more care than on one rank. A host token is attended on the rank of its layer; that rank alone
tells of it, while all ranks tell of a move. Late joins are settled by the ranks of their layer's stage, which tell the
stages behind (``runner/late_in_stages.py``). There are no drafts or captured steps, and no policies whose steps stop
between layers.
"""
