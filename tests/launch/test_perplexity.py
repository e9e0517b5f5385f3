"""python -m omniserve.perplexity: a line for the model as it is and for each way to quantise it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from omniserve.launch.int8_cache import rounded
from omniserve.launch.perplexity_cli import main, perplexity
from tests.ops.host_layout import quantize_rows
from tests.parity.models import tiny_model

pytest.importorskip("torchao")


def test_perplexity_is_that_of_the_second_half_of_each_window() -> None:
    model = tiny_model("llama").eval()
    ids = torch.randint(model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    total = 0.0
    for first in (0, 8, 16, 24):
        window = torch.tensor([ids[first : first + 16]])
        logits = model(window).logits[0].detach().double().log_softmax(-1)
        total -= sum(float(logits[at - 1, window[0, at]]) for at in range(8, 16))
    assert perplexity(model, ids, 16) == pytest.approx(math.exp(total / 32), rel=1e-5)


def test_kv_is_rounded_as_the_kernels_round_it() -> None:
    rows = torch.randn(2, 3, 40, 24, generator=torch.Generator().manual_seed(0))
    rows[0, 0, 0], rows[1, 2, 3, 4], rows[1, 0, 0, 0] = 0, torch.inf, torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        codes, scales = quantize_rows(rows.to(dtype))
        wanted = (codes * scales[..., None]).to(dtype)
        torch.testing.assert_close(rounded(rows.to(dtype)), wanted, rtol=0, atol=0, equal_nan=True)
    model = tiny_model("llama").eval()
    ids = torch.randint(model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, of_int8 = (perplexity(model, ids, 16, kv_dtype) for kv_dtype in ("auto", "int8"))
    assert exact != of_int8 == pytest.approx(exact, rel=0.05)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than a window of 64"):
        perplexity(tiny_model("llama"), [1, 2, 3], 64)


def test_the_command_prints_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.md"
    text.write_text("The with statement closes a file when its block ends.\n" * 20)
    assert main(["--text", str(text), "--window", "32", "--tokens", "96"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[-3]) for line in lines] == [
        ("weights", "KV"), *((weights, kv) for weights in ("as", "int8", "int4") for kv in ("auto", "int8")),
    ]  # fmt: skip
    sizes = [float(line[-1]) for line in lines[1::2]]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--texts", "file"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "omniserve.perplexity: error: there is no flag --texts; did you mean --text?" in line
