"""BackgroundCompile: a forked process compiles the halves of a model, while this one serves with them as they are.

A fork shares the weights, where a new process would load them once more. It has the lowest priority and ends with this
process. Of the engines of a server one compiles at a time, so the others find what it has stored.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import traceback

import torch
from torch._inductor import config as inductor_config
from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.engine.fingerprint import has_constant_steps
from omniserve.layers.compile_cache import one_compiler
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patched_model

logger = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1  # Linux's prctl: a signal when the parent dies
_MOST_FILES = 1 << 16


class BackgroundCompile:
    """Compiles and keeps the halves of a model on a CPU in a child process, from now on.

    To be made before this process has other threads that hold locks. With ``fused`` also the function for the halves
    between two attentions.

    Raises:
        OSError: No process can be made.
    """

    def __init__(self, model: PatchedModel, *, fused: bool) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            _run_child(model, fused)

    def poll(self) -> bool | None:
        """Return whether the halves were compiled, once the child has ended; None before. Not called after that."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        return None if pid == 0 else status == 0

    def stop(self) -> None:
        """End the child, if ``poll`` has not said that it has ended."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def compile_beside(model: PreTrainedModel, config: EngineConfig) -> BackgroundCompile | None:
    """Take the compiled halves that were kept of a model; if some are missing, have a child process compile them.

    Returns:
        The child, or None if nothing is missing.
    """
    patched = patched_model(model, compile=True, lora=config.lora, latent_kv=config.execution.latent_kv)
    fused = has_constant_steps(config, patched.device)
    if patched.find_compiled(else_compile=False, fused=fused):
        return None
    logger.info("the model's layers run uncompiled until a process beside this one has compiled them")
    return BackgroundCompile(patched, fused=fused)


def _run_child(model: PatchedModel, fused: bool) -> None:
    """Compile and end this process."""
    status = 1
    try:
        os.nice(_LOWEST_PRIORITY)
        # What the parent's peers wait for to be closed, such as its end of a pipe, must not stay open here.
        os.closerange(3, _MOST_FILES)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        done: list[bool] = []
        # The OpenMP threads of this thread did not come along, and it would wait for them; a new one has none yet.
        thread = threading.Thread(target=lambda: done.append(_compile(model, fused)))
        thread.start()
        thread.join()
        status = 0 if done == [True] else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _compile(model: PatchedModel, fused: bool) -> bool:
    # One after the other: the threads of a pool that this process's parent has compiled with did not come along.
    with one_compiler(model.family.model), torch.inference_mode(), inductor_config.patch(compile_threads=1):
        return model.find_compiled(else_compile=True, fused=fused)
