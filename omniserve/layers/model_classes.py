"""Imports transformers' model classes without torchao, which only checkpoints that it quantised need.

With its model classes transformers imports its quantisers, and with these torchao, wherever it is installed: time
at each start, and warnings about GPU kernels that nothing here calls. The programs call ``import_model_classes`` first.
``import omniserve`` does not, as in a user's own process that is the user's to decide.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

_QUANTISER = "transformers.quantizers.quantizer_torchao"
_QUANTISED_WEIGHTS = "transformers.integrations.torchao"


def import_model_classes() -> None:
    """Import transformers' model classes, if they are not; torchao counts as not installed meanwhile.

    A process that has imported torchao is left as it is.
    """
    if "transformers.modeling_utils" in sys.modules or "torchao" in sys.modules:
        return
    sys.modules["torchao"] = None  # type: ignore[assignment]  # which Python takes for a module that is not there
    try:
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module(_QUANTISED_WEIGHTS)
    finally:
        del sys.modules["torchao"]


def import_torchao_for(model: str) -> None:
    """Import torchao and what transformers does with it, if a checkpoint's weights are torchao's.

    Args:
        model: Folder or hub id of a model, or of adapters of one.

    Raises:
        OSError: There is no such model.
    """
    from transformers.utils import is_torchao_available

    if is_torchao_available() or importlib.util.find_spec("torchao") is None or not _is_quantised_by_torchao(model):
        return
    is_torchao_available.cache_clear()
    for name in (_QUANTISER, _QUANTISED_WEIGHTS):
        importlib.reload(sys.modules[name])


def _is_quantised_by_torchao(model: str) -> bool:
    from transformers import PreTrainedConfig
    from transformers.utils import find_adapter_config_file

    if not (Path(model) / "config.json").is_file() and (adapters := find_adapter_config_file(model)) is not None:
        model = json.loads(Path(adapters).read_text())["base_model_name_or_path"]
    config, _ = PreTrainedConfig.get_config_dict(model)
    quantisation = config.get("quantization_config") or {}
    return quantisation.get("quant_method") == "torchao"
