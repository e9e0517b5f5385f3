"""Imports what an engine process needs. The process from which these are forked imports this, as the server starts."""

import logging

# transformers imports it for quantised models; it warns of each library that was built for another torch.
logging.getLogger("torchao").setLevel(logging.ERROR)

import torch  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401

import omniserve.engine.engine  # noqa: E402
import omniserve.launch.upkeep  # noqa: E402
import omniserve.profiling  # noqa: E402, F401
