"""Train the built-in model: a small Llama that writes like Python's documentation.

    python examples/train_builtin_model.py --output omniserve/builtin_model --steps 2400

The text comes from the standard library of the Python that runs this script: ``pydoc_data.topics``, the docstrings of
its modules, read with ``ast`` (no module is imported for it), and those of the built-in types and functions. A part of
it is in chat form, so that chat answers read like documentation too. The same seed, steps, threads and Python version
give the same text, tokenizer and batches.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import inspect
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, USER, ASSISTANT, SYSTEM, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, USER, ASSISTANT, SYSTEM, END]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QUESTIONS = (
    "What does {} do?", "What is {}?", "How do I use {}?", "Explain {}.", "Tell me about {}.", "Describe {}.",
    "What is {} for?", "Can you explain {}?",
)  # fmt: skip
GREETINGS = ("Hello!", "Hi", "Hello", "Hey there", "Good morning", "Who are you?", "What can you do?", "Help")
GREETING_ANSWER = "Hello! I am a small model trained on Python's documentation. Ask me about the standard library."
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
MAX_LENGTH = 2048


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield (name, signature, docstring) of the modules, classes and functions of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS & set(parts) or path.name == "topics.py":
            continue
        module = ".".join(part for part in parts if part != "__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a few modules hold deliberate errors as test data
        yield from _walk(tree, module)
    for name, value in sorted(vars(builtins).items()):
        for member_name, member in [(name, value), *sorted(vars(value).items() if isinstance(value, type) else ())]:
            if doc := inspect.getdoc(member) if not member_name.startswith("__") else None:
                yield member_name if member is value else f"{name}.{member_name}", "", doc


def _walk(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[tuple]:
    if doc := ast.get_docstring(node):
        arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        yield name, arguments, doc
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")


def documents(rng: random.Random) -> list[str]:
    """Return the training texts, plain and in chat form, shuffled."""
    texts, seen = [], set()
    for name, signature, doc in docstrings():
        if len(doc) < 20 or doc in seen:
            continue
        seen.add(doc)
        texts.append(f"{name}{signature}\n\n{doc}\n")
        answer = "\n\n".join(doc.split("\n\n")[:3])
        for question in rng.sample(QUESTIONS, 2):
            short = name.split(".", 1)[-1] if rng.random() < 0.3 else name
            texts.append(_chat(question.format(short), answer[:1200]))
    for name, text in topics.topics.items():
        texts.append(text)
        answer = "\n\n".join(text.split("\n\n")[1:4])
        texts += [_chat(question.format(name), answer[:1200]) for question in rng.sample(QUESTIONS, 3)]
    texts += [_chat(greeting, GREETING_ANSWER) for greeting in GREETINGS for _ in range(8)]
    rng.shuffle(texts)
    return texts


def _chat(question: str, answer: str) -> str:
    return f"{USER}\n{question}{END}\n{ASSISTANT}\n{answer}{END}\n"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer learned from ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[1:], chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip


class Batches:
    """Windows of the joined texts: half of them start where a text starts, as a prompt does."""

    def __init__(self, token_ids: list[list[int]], separator: int) -> None:
        joined = [[*ids, separator] for ids in token_ids]
        self.tokens = torch.tensor([token for ids in joined for token in ids])
        self.starts = torch.tensor([0, *(len(ids) for ids in joined)]).cumsum(0)[:-1]

    def draw(self, batch_size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Return ``[batch_size, length]`` int64 token ids."""
        starts = self.starts[torch.randint(len(self.starts), (batch_size,), generator=generator)]
        anywhere = torch.randint(len(self.tokens), (batch_size,), generator=generator)
        first = torch.where(torch.rand(batch_size, generator=generator) < 0.5, starts, anywhere)
        first = first.clamp(max=len(self.tokens) - length)
        return self.tokens[first[:, None] + torch.arange(length)]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over 100 steps, then follow a cosine down to 2 % of the peak."""
    if step < 100:
        return peak * (step + 1) / 100
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - 100) / max(1, steps - 100))))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict) -> None:
    """Write weights (bf16), tokenizer, generation config and the facts of the training run."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model)
    rounded.bfloat16()
    rounded.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.bos_token_id,
    )  # fmt: skip
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the model with random weights."""
    vocabulary = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True,
        bos_token_id=vocabulary[END_OF_TEXT], eos_token_id=[vocabulary[END_OF_TEXT], vocabulary[END]],
    )  # fmt: skip
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, held_out: Batches) -> float:
    """Return the loss on the same 32 windows of held-out texts every time."""
    generator = torch.Generator().manual_seed(1)
    return sum(loss_of(model, held_out.draw(4, 512, generator)).item() for _ in range(8)) / 8


def train(model: LlamaForCausalLM, batches: Batches, args: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Train, and yield (steps done, smoothed loss) after every step."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(args.seed)
    recent = None
    for step in (progress := tqdm(range(args.steps), mininterval=10)):
        # Mostly short windows, which are cheap; now and then one as long as the model may see, so that rotary positions
        # up there are known.
        length = MAX_LENGTH if step % 40 == 39 else 1024 if step % 8 == 7 else 256
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        loss = loss_of(model, batches.draw(args.batch_tokens // length, length, generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = loss.item() if recent is None else 0.98 * recent + 0.02 * loss.item()
        progress.set_postfix(loss=f"{recent:.3f}", refresh=False)
        yield step + 1, recent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="a multiple of 2048")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-texts", type=int, help="train on this many texts only, to try the script")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints in the output folder")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    began = time.monotonic()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    texts = documents(random.Random(args.seed))[: args.max_texts]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    token_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    num_held_out = max(1, len(token_ids) // 50)
    batches = Batches(token_ids[num_held_out:], tokenizer.eos_token_id)
    held_out = Batches(token_ids[:num_held_out], tokenizer.eos_token_id)
    model = new_model(tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(texts)} texts, {len(batches.tokens):,} training tokens, {num_parameters:,} parameters", flush=True)

    for step, loss in train(model, batches, args):
        if step % args.save_every == 0 or step == args.steps:
            facts = dict(
                steps=step, of=args.steps, seed=args.seed, batch_tokens=args.batch_tokens,
                learning_rate=args.learning_rate, train_tokens=len(batches.tokens), train_loss=round(loss, 4),
                held_out_loss=round(held_out_loss(model, held_out), 4), seconds=round(time.monotonic() - began),
                python=platform.python_version(), torch=torch.__version__,
            )  # fmt: skip
            save(model, tokenizer, args.output, facts)
            print(f"\n{json.dumps(facts)}", flush=True)


if __name__ == "__main__":
    main()
