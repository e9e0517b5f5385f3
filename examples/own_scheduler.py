"""A scheduling policy of one's own: shortest prompt first.

A server takes it too, if Python finds this file:
PYTHONPATH=examples python -m omniserve.server --scheduler own_scheduler:ShortestPromptFirst
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import omniserve
from omniserve.core.plan import StepPlan
from omniserve.sched.batch import Batch
from omniserve.sched.policy import RequestScheduler
from omniserve.sched.state import Phase

MODEL = Path(omniserve.__file__).parent / "builtin_model"


class ShortestPromptFirst(RequestScheduler):
    """Decode what was admitted, oldest first; then admit the shortest prompt, whatever its class."""

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        for state in list(self.in_arrival_order(self.device.values())):
            if state.phase is Phase.DEVICE and state not in batch:  # not preempted for an older one just now
                self.run_or_preempt(batch, state, victims=(state.service_class,))
        waiting = [state for queue in self.waiting.values() for state in queue]
        for state in sorted(waiting, key=lambda state: (state.num_tokens, state.order)):
            if not self.admit(batch, state):
                break
        return self.make_plan(batch, now_s)


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    config = omniserve.EngineConfig(
        scheduler="own_scheduler:ShortestPromptFirst", kv="paged", max_num_requests=1, compile=False
    )
    prompts = {"long": "Lists are mutable sequences, " * 20, "short": "A set", "middle": "Tuples are immutable. " * 5}
    with omniserve.Engine(model, config) as engine:
        names = {}
        for name, text in prompts.items():
            ids = tokenizer.encode(text, add_special_tokens=False)
            names[engine.add(omniserve.Request(prompt_token_ids=ids))] = name
        finished = []
        while engine.has_unfinished:
            finished += [names[output.request_id] for output in engine.step() if output.finished]
    print("finished in this order:", ", ".join(finished))


if __name__ == "__main__":
    main()
