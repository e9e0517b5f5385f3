"""A model that says what it is told to: after ``§key§`` it writes the text of that key, piece by piece, and ends.

It is a real Llama behind a real tokenizer, so that a server treats it as any other, but no answer is luck: tool calls,
JSON and plain texts can be forced, at any temperature, for tests of what becomes of them.

Attention and MLP add nothing to the residual stream, each scripted token has a direction of its own in it, and the
head maps that direction to the next piece. A token so knows its successor, and nothing else: every piece of text is an
added token that occurs once in all scripts.

A grammar (``tool_choice: required``, a JSON schema) has its way all the same. Where it leaves one text alone, only that
text's own tokenization is allowed: a script whose pieces end elsewhere is left there. For such answers give the pieces
yourself: the text that is forced at the begin as the first one, the others ending inside of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import omniserve

OTHERWISE = "These words follow whatever has no key, and then they end. "
# As Hermes' and Qwen's templates: tools in front, calls and their answers between tags, as is thinking. The last key of
# the chat comes once more at its end, wherever a client put it (into a part, beside an instruction, into the result of
# tool).
CHAT_TEMPLATE = """\
{% set last = namespace(key='') %}\
{% if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}\
{% for message in messages %}\
<|{{ 'user' if message.role == 'tool' else 'system' if message.role == 'developer' else message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}\
{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>\
{% endfor %}<|end|>
{% set parts = (message.content or '').split('§') %}\
{% if parts | length > 2 %}{% set last.key = '§' + parts[-2] + '§' %}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}<|assistant|>
{{ last.key }}{% endif %}"""
_END = "<|end|>"
_LOGIT = 100.0  # of the one token that may follow; the others have 0


def write_scripted_model(
    folder: Path, scripts: Mapping[str, str | Sequence[str]], *, otherwise: str = OTHERWISE, max_length: int = 2048
) -> None:
    """Write a model folder that ``python -m omniserve.server --model`` and transformers load.

    Args:
        folder: Made if it does not exist.
        scripts: The text of each key, or its pieces. Texts are ASCII: the tokenizer's decoder would read other
            characters as bytes.
        otherwise: The text after a prompt that does not end with a key. With ``ignore_eos`` it begins again.
        max_length: Positions that the model has, in tokens.

    Raises:
        ValueError: A text is empty, not ASCII or the same as another, or a piece that is given is.
    """
    texts = {f"§{key}§": text for key, text in scripts.items()}
    pieces = _split([*texts.values(), otherwise])
    tokenizer = AutoTokenizer.from_pretrained(Path(omniserve.__file__).parent / "builtin_model")
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in [*texts, *(p for some in pieces for p in some)]]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = max_length
    follows = _successors(tokenizer, list(texts), pieces)
    torch.manual_seed(0)  # of what has no influence
    _model(tokenizer, follows, max_length).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split(texts: Sequence[str | Sequence[str]], size: int = 5) -> list[list[str]]:
    """Split each text that is not yet in pieces of ``size`` characters, or of more where a piece would not be new.

    Raises:
        ValueError: See ``write_scripted_model``.
    """
    given = [piece for text in texts if not isinstance(text, str) for piece in text]
    seen = set(given)
    if len(seen) < len(given):
        raise ValueError(f"the pieces of scripted texts must differ, got {sorted(given)}")
    split = []
    for text in texts:
        for part in [text] if isinstance(text, str) else text:
            if not part or not part.isascii():
                raise ValueError(f"a scripted text must be ASCII and not empty, got {part!r}")
        if not isinstance(text, str):
            split.append(list(text))
            continue
        pieces: list[str] = []
        rest = text
        while rest:
            length = next((n for n in range(size, len(rest)) if rest[:n] not in seen), len(rest))
            piece, rest = rest[:length], rest[length:]
            while piece in seen:  # the end of a text may be that of another: it joins what is before it
                if not pieces:
                    raise ValueError(f"two scripted texts must differ, got {text!r} twice or as a piece of another")
                before = pieces.pop()
                seen.remove(before)
                piece = before + piece
            seen.add(piece)
            pieces.append(piece)
        split.append(pieces)
    return split


def _successors(tokenizer: PreTrainedTokenizerBase, keys: list[str], pieces: list[list[str]]) -> dict[int, int]:
    """Return the id behind each scripted id; the last of ``pieces`` has no key, and follows the end token, too."""
    end = tokenizer.convert_tokens_to_ids(_END)
    follows = {}
    for key, some in zip([*keys, _END], pieces, strict=True):
        ids = tokenizer.convert_tokens_to_ids([key, *some])
        assert len(set(ids)) == len(ids) and tokenizer.decode(ids[1:]) == "".join(some), some
        follows |= dict(zip(ids, [*ids[1:], end], strict=True))
    return follows


def _model(tokenizer: PreTrainedTokenizerBase, follows: Mapping[int, int], max_length: int) -> LlamaForCausalLM:
    """Return a model of two layers, in bfloat16, after whose token comes the one that ``follows``.

    A token that is no key of ``follows`` goes on as the end token does.
    """
    end = tokenizer.convert_tokens_to_ids(_END)
    directions = {token: i for i, token in enumerate(follows)}
    hidden_size = -(-len(directions) // 64) * 64
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, end],
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings_VD, head_VD = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
        embeddings_VD[:, directions[end]] = 1.0
        for token, i in directions.items():
            embeddings_VD[token] = 0.0
            embeddings_VD[token, i] = 1.0
            head_VD[follows[token], i] = _LOGIT / hidden_size**0.5  # the norm makes a direction so long
    return model
