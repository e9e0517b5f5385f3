"""A GGUF file as a model: a folder with its config, tokenizer and chat template, made once; the file has the weights.

    python -m omniserve.launch.gguf_folder FILE.gguf     # prints the folder

transformers takes a while to read the vocabulary of such a file, and needs torch for it. So a process of its own does
it, at the first start; the folder is kept in ``gguf`` of the cache folder. What the file says of the end of a turn is
in ``generation_config.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from omniserve.core.version import __version__
from omniserve.latency.profile import cache_folder

_POINTER = "gguf.json"
"""A file of the folder that names the GGUF file."""

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def gguf_of(model: str) -> Path | None:
    """Return the GGUF file that a model folder stands for; None if it is a folder of another kind, or a hub id.

    Raises:
        ValueError: The file is not there any more.
    """
    pointer = Path(model) / _POINTER
    if not pointer.is_file():
        return None
    path = Path(json.loads(pointer.read_text())["file"])
    if not path.is_file():
        raise ValueError(f"{path}, which {model} was made of, is not there any more; delete that folder")
    return path


def folder_of(file: Path) -> Path:
    """Return the folder that stands for a GGUF file; a process makes it if it is not there.

    Raises:
        ValueError: The file cannot be read as a model; the message says why.
    """
    if _PART.search(file.name):
        raise ValueError(f"--model {file}: a part of a split file; join them with llama-gguf-split --merge")
    file = Path(os.path.abspath(file))  # a link keeps its name: the hub's cache names files by their digests
    made = _place_of(file)
    if (made / _POINTER).is_file():
        return made
    print(f"reading the config and the tokenizer of {file.name}, once", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", __name__, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"--model {file}: transformers cannot read it as a model: {last}")
    return made


def file_in(folder: Path, name: str | None) -> Path:
    """Return the GGUF file of a folder: the one of this name, or the only one.

    Raises:
        ValueError: There is none, or there are several to choose from.
    """
    if name is not None:
        if not (folder / name).is_file():
            raise ValueError(f"--gguf-file {name}: {folder} has no such file")
        return folder / name
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"--model {folder}: it has {len(files)} GGUF files; choose one with --gguf-file: {names}")
    return files[0]


def hub_file(model: str, name: str, revision: str | None = None) -> Path:
    """Return a GGUF file of a repository of Hugging Face's hub, which is fetched if it is not there.

    Args:
        model: The hub id.
        name: The file's name.
        revision: Branch, tag or commit; None: the main branch.

    Raises:
        ValueError: There is no such repository or file, or it cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except OSError as error:
        raise ValueError(f"--model {model} --gguf-file {name}: it cannot be fetched from the hub: {error}") from error


@contextlib.contextmanager
def one_reader() -> Iterator[None]:
    """Let transformers read each file's table once, not three times.

    Raises:
        ImportError: The package ``gguf`` is not installed.
    """
    gguf = import_gguf()
    own = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(own)
    try:
        yield
    finally:
        gguf.GGUFReader = own


def import_gguf():  # type: ignore[no-untyped-def]  # it has no types
    """Return the package ``gguf``.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("to read a GGUF file, install gguf: pip install 'omniserve[gguf]'") from error
    return gguf


def _place_of(file: Path) -> Path:
    status = file.stat()
    versions = f"{__version__} {importlib.metadata.version('transformers')}"
    parts = f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{versions}"
    key = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return cache_folder() / "gguf" / key / file.stem


def _make(file: Path) -> Path:
    """Write the folder, whole or not at all."""
    from omniserve.layers.model_classes import import_model_classes

    import_model_classes()
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    made = _place_of(file)
    made.parent.mkdir(parents=True, exist_ok=True)
    with one_reader(), tempfile.TemporaryDirectory(dir=made.parent) as unfinished:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=str(file))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=str(file))
        fields = import_gguf().GGUFReader(file).fields
        ends = {int(fields[key].contents()) for key in _END_KEYS if key in fields}
        if "tokenizer.chat_template" in fields:
            tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
        generation = GenerationConfig.from_model_config(config)
        generation.eos_token_id = sorted(ends) or generation.eos_token_id
        config.__dict__.pop("quantization_config", None)
        config.dtype = "bfloat16"  # files of codes have no dtype of their own; norms are in fp32 there
        config.save_pretrained(unfinished)
        generation.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (Path(unfinished) / _POINTER).write_text(json.dumps({"file": str(file)}))
        try:
            os.rename(unfinished, made)
        except OSError:  # another process was first
            if not (made / _POINTER).is_file():
                raise
        Path(unfinished).mkdir(exist_ok=True)  # for the context to delete
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    print(_make(Path(os.path.abspath(parser.parse_args().file))))
