"""GGUF files as models: the folder that stands for one, what is refused, and an engine that serves one."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import omniserve.launch.models
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.launch import gguf_folder
from omniserve.launch.flags import add_engine_flags, model_from
from omniserve.launch.gguf_folder import gguf_of, one_reader
from omniserve.launch.loading import EngineLoader
from omniserve.launch.models import checked_model, load_tokenizer
from tests.gguf_files import END, END_OF_TURN, TOKENS, write_llama

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|eot|>{% endfor %}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a home folder, which is that of this process and of those that it starts."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("HOME", str(folder))
        patches.delenv("XDG_CACHE_HOME", raising=False)
        yield folder


@pytest.fixture(scope="module")
def file(home: Path) -> Path:
    """Return a tiny GGUF file, alone in a folder."""
    (home / "models").mkdir()
    return write_llama(home / "models" / "tiny-Q4_K_M.gguf", settings={"tokenizer.chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def folder(file: Path) -> str:
    """Return the folder that stands for the file."""
    return checked_model(str(file))


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process be started."""
    monkeypatch.setattr(gguf_folder.subprocess, "run", lambda *_, **__: pytest.fail("a folder is made"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do here what a process would do: that takes seconds to start."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[1:3] == ["-m", "omniserve.launch.gguf_folder"]
        try:
            gguf_folder._make(Path(command[3]))
        except (ImportError, ValueError):
            return SimpleNamespace(returncode=1, stderr=traceback.format_exc())
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gguf_folder.subprocess, "run", run)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files for which folders are asked, of which none is made."""
    files: list[Path] = []

    def folder_of(file: Path) -> Path:
        files.append(file)
        return Path("made")

    monkeypatch.setattr(omniserve.launch.models, "folder_of", folder_of)
    return files


def _loader(model: str, dtype: str = "float32") -> EngineLoader:
    config = EngineConfig(
        scheduler="fcfs", device_kv_bytes=1 << 20, host_kv_bytes=0, execution=ExecutionConfig(compile=False)
    )
    return EngineLoader(model=model, dtype=dtype, device="cpu", config=config)


def test_folders_are_kept_where_other_caches_are(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the home folder may be read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(checked_model(str(file))).is_relative_to(tmp_path / "omniserve" / "gguf")


def test_a_folder_stands_for_a_file(file: Path, folder: str, home: Path) -> None:
    made = Path(folder)
    assert made.is_relative_to(home / ".cache" / "omniserve" / "gguf") and made.name == "tiny-Q4_K_M"
    assert gguf_of(folder) == file
    assert not any(made.glob("*.safetensors")), "the weights stay in the file"
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.vocab_size, config.num_key_value_heads) == ("llama", len(TOKENS), 2)
    assert config.dtype is torch.bfloat16 and not hasattr(config, "quantization_config")
    ends = [TOKENS.index(END), TOKENS.index(END_OF_TURN)]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
    tokenizer = load_tokenizer(folder, False)
    assert len(tokenizer) == len(TOKENS)
    text = "hello there, a\u00e9\u4e2d"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "hello<|eot|>" and tokenizer(chat).input_ids[-1] == TOKENS.index(END_OF_TURN)
    leftover = [each for each in made.parent.iterdir() if each != made]
    assert not leftover


def test_a_folder_is_made_once(file: Path, folder: str, no_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_model(str(file)) == folder
    assert checked_model(f"~/models/{file.name}") == folder
    monkeypatch.chdir(file.parent)
    assert checked_model(file.name) == checked_model(f"./{file.name}") == folder
    assert checked_model(str(file.parent)) == checked_model(str(file.parent), file.name) == folder
    assert checked_model(folder) == folder, "the folder itself is a model, too"


def test_a_file_that_was_replaced_gets_another_folder(file: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> object:
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gguf_folder.subprocess, "run", run)
    data, status = file.read_bytes(), file.stat()
    try:
        file.write_bytes(data + bytes(32))
        assert checked_model(str(file)) != folder and len(asked) == 1
    finally:
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert checked_model(str(file)) == folder and len(asked) == 1


def test_a_link_is_served_under_its_own_name(
    home: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the hub's cache are links to files that are named by their digests."""
    monkeypatch.setattr(gguf_folder.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    (tmp_path / "0123abcd").write_bytes(file.read_bytes())
    link = tmp_path / "linked-Q8_0.gguf"
    link.symlink_to(tmp_path / "0123abcd")
    assert Path(checked_model(str(link))).name == "linked-Q8_0"


def test_the_only_file_of_a_folder_is_taken(tmp_path: Path, chosen: list[Path]) -> None:
    (tmp_path / "one.gguf").touch()
    (tmp_path / "README.md").touch()
    assert checked_model(str(tmp_path)) == "made" and chosen == [tmp_path / "one.gguf"]


def test_of_several_files_one_must_be_chosen(tmp_path: Path, chosen: list[Path]) -> None:
    for name in ("b-Q8_0.gguf", "a-Q4_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"has 2 GGUF files; choose one with --gguf-file: a-Q4_0.gguf, b-Q8_0.gguf"):
        checked_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"--gguf-file c.gguf: .* has no such file"):
        checked_model(str(tmp_path), "c.gguf")
    assert not chosen
    assert checked_model(str(tmp_path), "b-Q8_0.gguf") == "made" and chosen == [tmp_path / "b-Q8_0.gguf"]


def test_a_folder_with_weights_is_itself_a_model(tmp_path: Path, chosen: list[Path]) -> None:
    for name in ("config.json", "model.safetensors", "one.gguf"):
        (tmp_path / name).touch()
    assert checked_model(str(tmp_path)) == str(tmp_path) and not chosen
    assert checked_model(str(tmp_path), "one.gguf") == "made" and chosen == [tmp_path / "one.gguf"]


def test_a_folder_whose_only_weights_are_a_gguf_file_stands_for_it(tmp_path: Path, chosen: list[Path]) -> None:
    for name in ("config.json", "one.gguf"):
        (tmp_path / name).touch()
    assert checked_model(str(tmp_path)) == "made" and chosen == [tmp_path / "one.gguf"]


def test_a_file_of_a_repository_is_fetched(chosen: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def fetch(repository: str, name: str, *, revision: str | None) -> str:
        if name == "missing.gguf":
            raise OSError("404")
        asked.append((repository, name, revision))
        return f"/cache/{name}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert checked_model("owner/name", "tiny.gguf") == "made"
    assert asked == [("owner/name", "tiny.gguf", None)] and chosen == [Path("/cache/tiny.gguf")]
    with pytest.raises(ValueError, match=r"--model owner/name --gguf-file missing.gguf: it cannot be fetched.*404"):
        checked_model("owner/name", "missing.gguf")
    assert checked_model("owner/name", "tiny.gguf", "v2") == "made" and asked[1:] == [("owner/name", "tiny.gguf", "v2")]
    assert checked_model("owner/name") == "owner/name"


def test_flags_name_the_file(tmp_path: Path, chosen: list[Path]) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    args = parser.parse_args(["--model", str(tmp_path), "--gguf-file", "b.gguf"])
    assert model_from(args) == "made" and chosen == [tmp_path / "b.gguf"]


@pytest.mark.parametrize("arguments", [["--gguf-file", "a.gguf"], ["--model", "{}/a.gguf", "--gguf-file", "b.gguf"]])
def test_a_file_that_is_named_in_vain_is_refused(arguments: list[str], tmp_path: Path, chosen: list[Path]) -> None:
    """The built-in model has no GGUF file, and of a file there is no other."""
    (tmp_path / "a.gguf").touch()
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with pytest.raises(ValueError, match="--gguf-file"):
        model_from(parser.parse_args([each.format(tmp_path) for each in arguments]))
    assert not chosen


def test_a_part_of_a_split_file_is_refused(tmp_path: Path, no_process: None) -> None:
    for part in (1, 2):
        (tmp_path / f"big-0000{part}-of-00002.gguf").touch()
    for arguments in ((str(tmp_path / "big-00001-of-00002.gguf"),), (str(tmp_path), "big-00002-of-00002.gguf")):
        with pytest.raises(ValueError, match=r"part of a split file; join them with llama-gguf-split --merge"):
            checked_model(*arguments)


def test_a_file_that_is_not_gguf_is_refused_with_the_reason(home: Path, tmp_path: Path, in_process: None) -> None:
    (tmp_path / "text.gguf").write_text("This is no GGUF file, but a text that is long enough for a header.\n" * 4)
    with pytest.raises(ValueError, match=r"text.gguf: transformers cannot read it as a model: .*GGUF magic"):
        checked_model(str(tmp_path / "text.gguf"))
    assert not list((home / ".cache" / "omniserve" / "gguf").glob("*/text"))
    (tmp_path / "text.txt").touch()
    with pytest.raises(ValueError, match=r"is a file; give the folder that holds config.json.*or a .gguf file"):
        checked_model(str(tmp_path / "text.txt"))


def test_a_file_that_is_gone_is_told(file: Path, folder: str) -> None:
    hidden = file.rename(file.with_suffix(".hidden"))
    try:
        with pytest.raises(ValueError, match=r"tiny-Q4_K_M.gguf, which .* was made of, is not there any more; delete"):
            gguf_of(folder)
        with pytest.raises(ValueError, match="is not there any more"):
            _loader(folder).load_model(lambda what: None)
    finally:
        hidden.rename(file)
    assert gguf_of(folder) == file


def test_a_model_of_another_kind_stands_for_no_file(tmp_path: Path) -> None:
    assert gguf_of(str(tmp_path)) is None and gguf_of("owner/name") is None


def test_a_missing_package_is_named(
    file: Path, folder: str, tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder is made, and where the model is loaded."""
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"other.gguf: .*install gguf: pip install 'omniserve\[gguf\]'"):
        checked_model(str(other))
    with pytest.raises(ImportError, match=r"install gguf: pip install 'omniserve\[gguf\]'"):
        _loader(folder).load_model(lambda what: None)


def test_readers_are_kept_only_meanwhile(file: Path) -> None:
    import gguf

    own = gguf.GGUFReader
    with one_reader():
        assert gguf.GGUFReader(file) is gguf.GGUFReader(file)
    assert gguf.GGUFReader is own and own(file) is not own(file)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_weights_are_read_from_the_file(
    folder: str, file: Path, dtype: str, expected: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    model = _loader(folder, dtype).load_model(told.append)
    assert model.dtype is expected and not model.training and "finding the codes of the weights" in told
    assert all(hasattr(layer.self_attn.q_proj.weight, "omniserve_quantized") for layer in model.model.layers)
    assert "served widened" not in caplog.text
    assert not hasattr(model.config, "quantization_config") and model.num_parameters() > 0
    widened = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=expected)
    for name, value in widened.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_file_of_the_same_name_here_is_another(
    folder: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes a file of the working folder first."""
    write_llama(tmp_path / file.name, {"token_embd": "Q4_0"})
    monkeypatch.chdir(tmp_path)
    model = _loader(folder).load_model(lambda what: None)
    widened = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=str(file), dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, widened.lm_head.weight)


def test_tensors_of_other_types_are_told(
    home: Path, folder: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The folder of another file stands for this one here, so that none is made."""
    path = write_llama(tmp_path / "other.gguf", {"token_embd": "F16", "ffn_up": "Q3_K", "ffn_down": "Q4_0"})
    for name in Path(folder).iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    (tmp_path / "gguf.json").write_text(json.dumps({"file": str(path)}))
    _loader(str(tmp_path), "auto").load_model(lambda what: None)
    assert (
        "other.gguf: tensors that are served widened to torch.bfloat16: 1 of F16, 11 of F32, 2 of Q3_K" in caplog.text
    )


def test_an_engine_generates_the_tokens_of_the_widened_model(folder: str, file: Path) -> None:
    widened = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompts = [[5, 9, 200, 31], list(range(1, 40)), [77]]
    with _loader(folder)(lambda what: None) as engine:
        assert isinstance(engine, Engine)
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
        outputs = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = widened.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert list(output.token_ids) == expected[0, len(prompt) :].tolist()
