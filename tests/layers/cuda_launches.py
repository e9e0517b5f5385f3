"""Print what the compiler would launch on an H200 between two attentions, a line for each model; needs no GPU.

python -m tests.layers.cuda_launches llama qwen3 llama/example llama/apart

Example: the compiler sees a usual number of tokens, as where torch is older than 2.13. Apart: each projection by
itself, and the two halves each by itself.
"""

from __future__ import annotations

import sys

from benchmarks.forecast.kernels import layers_on_gpu, pretend_to_have_a_gpu, recorded

_SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


if __name__ == "__main__":
    pretend_to_have_a_gpu()
    for name in sys.argv[1:]:
        model_type, _, how = name.partition("/")
        parts = ("behind", "before") if how == "apart" else ("between",)
        family = recorded(model_type, _SIZES)
        compiled = layers_on_gpu(family, parts=parts, is_merged=how != "apart", has_example=how == "example")
        print(name, *(launch for part in parts for launch in compiled[part].launches))
