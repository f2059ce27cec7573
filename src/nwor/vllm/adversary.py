"""The audit's drafter for vLLM."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from nwor.audit.adversary import draft


class Adversary:
    """Right often enough to be accepted, wrong often enough to be rejected.

    vLLM loads it by name (``method="custom_class"``).
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - vllm.config.VllmConfig
        self.k = config.speculative_config.num_speculative_tokens
        self.vocabulary = config.model_config.get_vocab_size()

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,  # noqa: ANN401, ARG002 - vLLM's interface
    ) -> list[list[int]]:
        """Draft for every request that sampled."""
        return [
            draft(
                token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist(), self.k, self.vocabulary
            )
            if got
            else []
            for row, got in enumerate(sampled_token_ids)
        ]
