"""Run latency-sensitive and best-effort requests together, with too little device memory for all of them.

The device KV pool holds about three best-effort requests. The others decode on the host tier: their KV is in CPU
memory, CPU threads compute their attention, and the results join later steps.
"""

from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

import omniserve

MODEL = Path(omniserve.__file__).parent / "builtin_model"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    config = omniserve.EngineConfig(
        scheduler="omniserve",
        kv="tiered",
        device_kv_bytes=2 << 20,
        host_kv_bytes=64 << 20,
        execution=omniserve.ExecutionConfig(compile=False),
    )

    def request(text: str, service_class: str, max_tokens: int) -> omniserve.Request:
        return omniserve.Request(
            prompt_token_ids=tokenizer.encode(text, add_special_tokens=False),
            sampling=omniserve.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            service_class=service_class,
        )

    batch_work = [request(text[:500], "BE", 64) for text in list(topics.values())[:16]]
    questions = [request(f"The {name} statement", "LS", 24) for name in ("if", "for", "while", "with")]

    with omniserve.Engine(model, config, tokenizer=tokenizer) as engine:
        completions = engine.generate(batch_work + questions, progress=True)

    for completion in completions[len(batch_work) :]:
        times = completion.times
        print(f"LS, first token after {times.first_token_s - times.arrival_s:.2f} s: {completion.text!r}")
    best_effort = completions[: len(batch_work)]
    num_tokens = sum(len(completion.token_ids) for completion in best_effort)
    num_host_tokens = sum(completion.num_host_tokens for completion in best_effort)
    print(f"BE: {num_tokens} tokens, {num_host_tokens} of them with attention on the host tier")


if __name__ == "__main__":
    main()
