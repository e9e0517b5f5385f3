"""A model of Hugging Face's hub at a revision: all of its files are fetched, and served from their folder."""

from __future__ import annotations

from pathlib import Path

_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "*.tflite", "*.mlmodel")
_OTHER_COPIES = ("original/*", "onnx/*", "openvino/*", "coreml/*")


def hub_folder(model: str, revision: str) -> str:
    """Return the folder of a repository at a revision; what is not there yet is fetched.

    That is all but weights in formats which are not served. Weights in PyTorch's own format are fetched if there are
    no others.

    Args:
        model: The hub id.
        revision: Branch, tag or commit.

    Raises:
        ValueError: There is no such repository or revision, or it cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, revision=revision, ignore_patterns=[*_OTHER_FORMATS, *_OTHER_COPIES]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=["*.bin"]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {model} --revision {revision}: it cannot be fetched from the hub: {error}"
        ) from error
    return str(folder)
