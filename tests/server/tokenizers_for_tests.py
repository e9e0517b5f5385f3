"""Two tiny tokenizers: byte-level BPE, and SentencePiece-like with byte tokens. Deterministic, no download."""

from __future__ import annotations

import copy
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Qwen's and Hermes' templates: tools in front, calls and their answers between tags.
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>"
    "{% endif %}{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\n{{ '{' }}\"name\": "
    "{{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}{{ '}' }}\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. A list is a mutable sequence, a tuple is not.",
    "Grüße aus Köln: ein Baum, zwei Bäume. Ελληνικά και русский текст. 日本語の文章、漢字。 emoji 🙂🙃🚀 done",
]


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of some 400 tokens with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tokenizer_with(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of its own with a chat template, or several by name."""
    backend = copy.deepcopy(byte_level_tokenizer().backend_tokenizer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Build what Llama 2 has: '▁' for spaces, <0xNN> byte tokens, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "s", "▁sat", ".", "a", "b", "▁a", "é", "日", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
