"""Serve a type that OmniServe has no code for: its own layers are cut at the attention. The weights are random."""

import torch
from transformers import AutoModelForCausalLM, Olmo2Config

import omniserve


def main() -> None:
    torch.manual_seed(0)
    config = Olmo2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=1024, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = [torch.randint(2048, (length,)).tolist() for length in (5, 40, 160, 90)]
    generated = [
        model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]

    omniserve.patch(model)
    settings = omniserve.EngineConfig(device_kv_bytes=8 << 20, host_kv_bytes=64 << 20)
    sampling = omniserve.SamplingParams(max_tokens=24)
    with omniserve.Engine(model, settings) as engine:
        requests = [
            omniserve.Request(prompt_token_ids=prompt, sampling=sampling, service_class=name)
            for prompt, name in zip(prompts, ("LS", "BE", "BE", "LS"), strict=True)
        ]
        completions = list(engine.generate(requests))

    print("the same tokens as generate():", [list(c.token_ids) for c in completions] == generated)


if __name__ == "__main__":
    main()
