"""BestEffortMix: how long prompts and outputs of BE requests are lately, so that work on both can be compared."""

from __future__ import annotations

from omniserve.sched.state import RequestState

_RATE = 1 / 32
"""Weight of each new request in the means."""


class BestEffortMix:
    """Learns from BE requests that end; until one has, it believes what requests say they want at most."""

    def __init__(self) -> None:
        self._prompt_tokens = self._output_tokens = 0.0
        self._has_ended = False

    @property
    def prompt_token_value(self) -> float:
        """The output tokens that a BE prompt token stands for: E[output] / E[prompt]; 1 before the first request.

        A prompt brings nothing by itself, but the outputs that it makes possible: 0.015 for a prompt of 9,000 tokens
        with an output of 136, 1 where both are equally long.
        """
        return self._output_tokens / self._prompt_tokens if self._prompt_tokens else 1.0

    def note_arrival(self, state: RequestState) -> None:
        """Take note of a BE request that has come."""
        if not self._has_ended:
            self._learn(state.num_prompt_tokens, state.request.sampling.max_tokens)

    def note_end(self, state: RequestState) -> None:
        """Take note of a BE request that has ended, with the tokens that it got."""
        if not self._has_ended:
            self._prompt_tokens, self._has_ended = 0.0, True
        self._learn(state.num_prompt_tokens, state.num_output_tokens)

    def _learn(self, prompt_tokens: int, output_tokens: int) -> None:
        rate = _RATE if self._prompt_tokens else 1.0
        self._prompt_tokens += rate * (prompt_tokens - self._prompt_tokens)
        self._output_tokens += rate * (output_tokens - self._output_tokens)
