"""Imports what an engine process needs. The process from which these are forked imports this, as the server starts."""

from omniserve.core.logs import hold_logs, take_over_loggers

hold_logs()  # how they are to be written is not known yet

import torch  # noqa: E402, F401

take_over_loggers()  # before libraries log through torch's

from omniserve.layers.model_classes import import_model_classes  # noqa: E402

import_model_classes()

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401

import omniserve.engine.engine  # noqa: E402
import omniserve.launch.background_startup  # noqa: E402
import omniserve.profiling  # noqa: E402, F401
