"""Every layer family against Hugging Face: the token-packed halves, compiling, prepacking, generate(), unpatch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from omniserve.core.spec import AttentionSpec
from omniserve.layers.compiled import structure
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patch, unpatch
from omniserve.layers.tracing.traced import TracedFamily
from tests.parity.models import MODELS, tiny_model
from tests.quick import slow_except

PROMPT_LENGTHS = (17, 5, 12)
NUM_NEW_TOKENS = 24

# Logits here are of order 1-10. The packed pass sums in another order than HF's batched one: some 1e-6 in fp32.
FP32_TOLERANCE = 1e-4
# bf16 keeps 8 bits: roundings of up to 1 % pile up over three layers, more where experts are chosen anew.
BF16_LOGPROB_TOLERANCE = 0.25


# Kinds of layers where there are several. Those of Gemma 4: a window; one that leaves its K and V; one that takes them;
# with four layers also full attention that does neither.
STRUCTURES = dict.fromkeys(("qwen3_moe", "cohere2", "deepseek_v3", "gemma3", "llama4", "smollm3"), 2) | {"gemma4": 3}


@contextlib.contextmanager
def merging(is_merged: bool) -> Iterator[None]:
    """Let ``patch`` merge projections of one input, as it does on a GPU."""
    with pytest.MonkeyPatch.context() as patches:
        if is_merged:
            patches.setattr("omniserve.layers.weights.merged._DEVICES", {"cpu"})
            patches.setattr("omniserve.layers.weights.packed.HAS_VECTOR_KERNEL", False)
        yield


def _prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, 160, (length,), generator=generator) for length in PROMPT_LENGTHS]


def _generate(model: PreTrainedModel, *, use_cache: bool = True) -> tuple[Tensor, Tensor]:
    """Greedy tokens and logits of the left-padded prompts."""
    longest = max(PROMPT_LENGTHS)
    rows = [nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in _prompts()]
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in PROMPT_LENGTHS])
    output = model.generate(
        torch.stack(rows),
        attention_mask=mask,
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, torch.stack(output.logits)


def _attend(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, start: int, spec: AttentionSpec) -> Tensor:
    """Attention of the queries at positions ``start ...`` of one request over its whole context, written out."""
    group = q_TNH.shape[1] // k_SKH.shape[1]
    keys, values = (rows.repeat_interleave(group, dim=1).float() for rows in (k_SKH, v_SKH))
    scores = torch.einsum("tnh,snh->nts", q_TNH.float(), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query_position = start + torch.arange(q_TNH.shape[0])[:, None]
    key_position = torch.arange(keys.shape[0])[None]
    if spec.alibi_slopes is not None:
        scores = scores + torch.tensor(spec.alibi_slopes)[:, None, None] * (key_position - query_position)
    visible = key_position <= query_position
    if spec.window:
        visible &= key_position > query_position - spec.window
    if spec.chunk:
        visible &= key_position // spec.chunk == query_position // spec.chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if spec.sinks is not None:
        sinks = torch.tensor(spec.sinks)[:, None, None].expand(-1, q_TNH.shape[0], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("nts,snh->tnh", weights, values).flatten(1).to(q_TNH.dtype)


@torch.inference_mode()
def _packed_logits(patched: PatchedModel, sequences: Sequence[Tensor], *chunks: int) -> list[Tensor]:
    """Logits of all tokens of all sequences: every step packs the next chunk of each sequence into one [T, D].

    Args:
        patched: The model.
        sequences: Token ids.
        chunks: Sizes of the chunks, in turn.
    """
    sizes_of_chunks = cycle(chunks)
    caches = [[[torch.empty(0)] * 2 for _ in range(patched.num_layers)] for _ in sequences]
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while any(count < len(sequence) for count, sequence in zip(done, sequences, strict=True)):
        chunk = next(sizes_of_chunks)
        spans = [(start, min(start + chunk, len(s))) for start, s in zip(done, sequences, strict=True)]
        sizes = [stop - start for start, stop in spans]
        token_ids = torch.cat([s[start:stop] for s, (start, stop) in zip(sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(start, stop) for start, stop in spans])
        hidden = patched.embed(token_ids, positions)
        cos, sin = patched.rotary(positions) or (None, None)
        for layer in range(patched.num_layers):
            q, k, v = patched.pre_attention(layer, hidden, cos, sin)
            assert all(each.stride(-1) == 1 for each in (q, k, v))
            rows = []
            for index, (q_rows, k_rows, v_rows) in enumerate(
                zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
            ):
                cache = caches[index][layer]
                start = spans[index][0]
                cache[0] = torch.cat([cache[0], k_rows]) if start else k_rows
                cache[1] = torch.cat([cache[1], v_rows]) if start else v_rows
                rows.append(_attend(q_rows, cache[0], cache[1], start, patched.spec.attention[layer]))
            hidden = patched.post_attention(layer, torch.cat(rows), hidden)
        for index, part in enumerate(patched.logits(hidden).split(sizes)):
            logits[index].append(part)
        done = [stop for _, stop in spans]
    return [torch.cat(parts) for parts in logits]


@torch.no_grad()
def _hf_logits(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    return [model(sequence[None]).logits[0] for sequence in sequences]


def _bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def _snapshot(model: PreTrainedModel) -> object:
    modules = [(key, id(module), type(module), sorted(module.__dict__)) for key, module in model.named_modules()]
    return modules, [(key, id(p), p.requires_grad) for key, p in model.named_parameters()], _bits(model.state_dict())


@contextlib.contextmanager
def _patched(model: PreTrainedModel, *, is_merged: bool) -> Iterator[PatchedModel]:
    """Patch a model; its ``state_dict`` meanwhile, and every object and bit afterwards, are those from before."""
    before, bits = _snapshot(model), _bits(model.state_dict())
    with merging(is_merged):
        yield patch(model, compile=False).omniserve
    assert _bits(model.state_dict()) == bits, "state_dict() must give the dense weights while patched"
    unpatch(model)
    assert _snapshot(model) == before


@torch.inference_mode()
def _check_between(patched: PatchedModel) -> None:
    """Assert that what is between two attentions is the two halves."""
    positions = torch.arange(5)
    hidden, rotary = patched.embed(positions, positions), patched.rotary(positions) or (None, None)
    for layer in range(patched.num_layers - 1):
        attn = patched.pre_attention(layer, hidden, *rotary)[0].flatten(1)
        after = patched.post_attention(layer, attn, hidden)
        expected = (after, *patched.pre_attention(layer + 1, after, *rotary))
        for got, want in zip(patched.post_pre(layer, attn, hidden, *rotary), expected, strict=True):
            assert torch.equal(got, want)
        hidden = after


@pytest.mark.parametrize("name", MODELS)
def test_patched_halves_and_generate_give_what_hugging_face_gives(name: str) -> None:
    """Halves that are merged and not, over whole prompts, chunks and single tokens; and ``unpatch`` restores all."""
    model = tiny_model(name)
    tokens, logits = _generate(model)  # HF itself leaves attributes behind at the first call
    assert len(set(tokens[:, max(PROMPT_LENGTHS) :].flatten().tolist())) > 8, "a constant output would prove nothing"
    expected = _hf_logits(model, _prompts())
    assert len({structure(layer) for layer in TracedFamily(model).layers}) == STRUCTURES.get(name, 1)
    is_first_whole = list(MODELS).index(name) % 2 == 0
    for is_merged, use_cache in ((False, is_first_whole), (True, not is_first_whole)):
        with _patched(model, is_merged=is_merged) as patched:
            chunks = (99,) if use_cache else (7, 1, 1, 4)
            for got, want in zip(_packed_logits(patched, _prompts(), *chunks), expected, strict=True):
                torch.testing.assert_close(got, want, atol=FP32_TOLERANCE, rtol=0)
            _check_between(patched)
            patched_tokens, patched_logits = _generate(model, use_cache=use_cache)
            assert torch.equal(patched_tokens, tokens)
            torch.testing.assert_close(patched_logits, logits, atol=FP32_TOLERANCE, rtol=0)
    assert all(map(torch.equal, _hf_logits(model, _prompts()), expected))
    if is_first_whole:
        assert torch.equal(_generate(model)[0], tokens)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_log_probs_stay_close_with_prepacked_linears(name: str) -> None:
    model = tiny_model(name, torch.bfloat16, seed=2)
    expected = _hf_logits(model, _prompts())
    if list(MODELS).index(name) % 2:
        with _patched(model, is_merged=True):
            pass
    with _patched(model, is_merged=False) as patched:
        actual = _packed_logits(patched, _prompts(), 7)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype is torch.bfloat16
        difference = (got.float().log_softmax(-1) - want.float().log_softmax(-1)).abs()
        assert difference.mean() < BF16_LOGPROB_TOLERANCE / 4
        assert difference.quantile(0.99) < BF16_LOGPROB_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_halves_trace_as_one_graph_and_no_layer_recompiles(name: str) -> None:
    model = tiny_model(name, num_layers=4)
    family = TracedFamily(model)
    torch._dynamo.reset()
    counters.clear()
    pre = torch.compile(family.pre_attention, fullgraph=True, dynamic=True, backend="eager")
    post = torch.compile(family.post_attention, fullgraph=True, dynamic=True, backend="eager")
    with torch.inference_mode(), family.compiling():
        positions = torch.arange(6)
        hidden = family.embedding_and_head.embed(positions, positions)
        cos, sin = family.embedding_and_head.rotary(positions) or (None, None)
        for layer in family.layers:
            q, _, _ = pre(layer, hidden, cos, sin)
            hidden = post(layer, q.flatten(1), hidden)
    structures = len({structure(layer) for layer in family.layers})
    assert structures == (4 if name == "gemma4" else STRUCTURES.get(name, 1))
    assert counters["stats"]["unique_graphs"] <= 2 * structures


@pytest.mark.parametrize(
    ("dtype", "tolerance", "has_example", "is_merged"),
    slow_except(
        [(torch.float32, FP32_TOLERANCE, False, True)],
        [
            (dtype, tolerance, has_example, is_merged)
            for dtype, tolerance in ((torch.float32, FP32_TOLERANCE), (torch.bfloat16, 0.5))
            for has_example in (False, True)
            for is_merged in (False, True)
        ],
    ),
)  # fmt: skip
def test_three_graphs_serve_any_depth_and_token_count(
    dtype: torch.dtype, tolerance: float, has_example: bool, is_merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bf16: fused code rounds at other places than eager; hidden states here are of order 10, one ulp is 0.06.
    # An example: as on a GPU with an older torch.
    monkeypatch.setattr("omniserve.layers.compiled.needs_example", lambda on_gpu: has_example)
    monkeypatch.setattr("omniserve.layers.patched_model._WARM_UP_ROWS", {"cpu": 40})
    monkeypatch.setattr("omniserve.layers.compile_cache.CompileCache.find", lambda *_: None)
    for num_layers in (2, 6):
        model = tiny_model("llama", dtype, num_layers=num_layers)
        with merging(is_merged):
            eager = _probe(patch(model, compile=False).omniserve)
            unpatch(model)
            counters.clear()
            patched = patch(model, compile=True).omniserve
            patched.warm_up(fused=True)
            compiled = _probe(patched)
        assert counters["stats"]["unique_graphs"] == 3  # one a half, and one of both
        for got, want in zip(compiled, eager, strict=True):
            torch.testing.assert_close(got, want, atol=tolerance, rtol=0.02)


def _probe(patched: PatchedModel) -> list[Tensor]:
    """Outputs of every layer's halves for several token counts, from the same inputs whatever came before."""
    results = []
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        for num_tokens in (1, 2, 7, 64):
            hidden = torch.randn(num_tokens, patched.spec.hidden_size, generator=generator).to(patched.dtype)
            cos, sin = patched.rotary(torch.arange(num_tokens)) or (None, None)
            for layer in range(patched.num_layers):
                q, k, v = patched.pre_attention(layer, hidden, cos, sin)
                attn = q.flatten(1).contiguous()
                results += [q, k, v, patched.post_attention(layer, attn, hidden)]
                if layer + 1 < patched.num_layers:
                    between = patched.post_pre(layer, attn, hidden, cos, sin)
                    results += [each.clone() for each in between]
    return results


def test_compiled_halves_serve_mixed_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.layers.compile_cache.CompileCache.find", lambda *_: None)
    model = tiny_model("qwen3_moe")
    expected = _hf_logits(model, _prompts())
    counters.clear()
    actual = _packed_logits(patch(model).omniserve, _prompts(), 7)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, atol=FP32_TOLERANCE, rtol=0)
    # The dense layer and the sparse ones differ in what follows attention; each structure has its own pair.
    assert counters["stats"]["unique_graphs"] == 4


class _Adapter(nn.Module):
    """A linear as PEFT adapts it: the base stays a submodule, a low-rank product is added."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_keep_working() -> None:
    torch.manual_seed(0)
    model = tiny_model("llama")
    plain = _hf_logits(model, _prompts())
    for layer in model.model.layers:
        layer.self_attn.v_proj = _Adapter(layer.self_attn.v_proj)
        layer.mlp.down_proj = _Adapter(layer.mlp.down_proj)
    model.eval()
    expected = _hf_logits(model, _prompts())
    actual = _packed_logits(patch(model, compile=False).omniserve, _prompts(), 7)
    for got, want, before in zip(actual, expected, plain, strict=True):
        assert not torch.allclose(want, before, atol=0.1), "the adapter must matter"
        torch.testing.assert_close(got, want, atol=FP32_TOLERANCE, rtol=0)
