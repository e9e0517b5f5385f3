"""LoRALoads: reads adapters into their slots beside the steps."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import torch

from omniserve.core.lora import LoadLoRA, LoRAError
from omniserve.core.work import Done, HostEvent
from omniserve.layers.weights.lora import LoRAStacks
from omniserve.layers.weights.lora_files import read_lora


class LoRALoads:
    """Reads one adapter after another, in a thread."""

    def __init__(self, stacks: LoRAStacks, device: torch.device) -> None:
        self._stacks, self._device = stacks, device
        self._thread = ThreadPoolExecutor(1, "lora")
        self._ended: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def start(self, load: LoadLoRA) -> None:
        """Begin a load; its ``Done`` comes with ``poll``. On a GPU it waits for the steps launched before it."""
        launched: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
        self._thread.submit(self._load, load, launched)

    def poll(self) -> list[HostEvent]:
        """Return the loads that have ended since the last call."""
        events: list[HostEvent] = []
        while not self._ended.empty():
            events.append(self._ended.get())
        return events

    def close(self) -> None:
        """Wait for the load under way, and begin no other."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, load: LoadLoRA, launched: torch.cuda.Event | None) -> None:
        try:
            self._read(load, launched)
        except Exception as error:  # whatever it is, it is told to the requests that wait
            message = str(error) if isinstance(error, LoRAError) else f"{type(error).__name__}: {error}"
            self._ended.put(Done(move_id=load.move_id, ok=False, message=f"LoRA {load.lora.name}: {message}"))
        else:
            self._ended.put(Done(move_id=load.move_id, ok=True))

    def _read(self, load: LoadLoRA, launched: torch.cuda.Event | None) -> None:
        files = read_lora(load.lora.folder)
        if files.digest != load.lora.digest:
            raise LoRAError(f"the files in {load.lora.folder} have changed since it was loaded: load it again")
        if launched is None:
            self._stacks.load(load.slot, files)
            return
        with torch.cuda.stream(torch.cuda.Stream(self._device)) as stream:
            assert stream is not None
            stream.wait_event(launched)
            self._stacks.load(load.slot, files)
            stream.synchronize()
