"""A scheduling policy of one's own: shortest prompt first.

A server takes it too, if Python finds this file:
PYTHONPATH=examples python -m omniserve.server --scheduler own_scheduler:ShortestPromptFirst
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import omniserve
from omniserve.core.plan import StepPlan
from omniserve.sched import Policy
from omniserve.sched.request_queue import by_arrival
from omniserve.sched.state import Phase

MODEL = Path(omniserve.__file__).parent / "builtin_model"


class ShortestPromptFirst(Policy):
    """Decode what was admitted, oldest first; then admit the shortest prompt, whatever its class."""

    def schedule(self, now_s: float) -> StepPlan:
        batch = self.new_batch(now_s)
        for state in by_arrival(self.view.device.values()):
            if state.phase is Phase.DEVICE:  # not preempted for an older one just now
                batch.run_or_preempt(state, victims=(state.kind,))
        for state in sorted(by_arrival(self.view.waiting.values()), key=lambda state: state.num_tokens):
            if batch.admit(state) is not None:  # out of memory or of tokens, or too many requests
                break
        return batch.plan()


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    config = omniserve.EngineConfig(
        scheduler="own_scheduler:ShortestPromptFirst",
        kv="paged",
        max_num_seqs=1,
        execution=omniserve.ExecutionConfig(compile=False),
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
