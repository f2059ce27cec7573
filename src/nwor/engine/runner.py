"""A model, its attention taken over, run on packed rows over a durable store."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nwor.engine.errors import UnsupportedModelError
from nwor.engine.hook import ATTENTION, STEP_ARGUMENT, attention_of
from nwor.engine.probe import LayerSpec, probe_layers
from nwor.engine.sinks import WriteThrough
from nwor.engine.step import Earlier, Segment, Sink, Step
from nwor.engine.store import DurableStore
from nwor.metrics import Written

_CHECK_TOKENS = 10
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


class Runner:
    """Runs packed steps; gives the model's own attention back when closed.

    Args:
        model: a causal model; put into eval mode.

    Raises:
        UnsupportedModelError: see `nwor.engine.probe`; also if the engine's logits for a few tokens
            differ from the model's own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        model.eval()  # type: ignore[no-untyped-call]
        self.specs: tuple[LayerSpec, ...] = probe_layers(model)
        self._cuts_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._stack = ExitStack()
        own = self._own_logits()
        self._stack.enter_context(attention_of(model, ATTENTION))
        try:
            self._check(own)
        except BaseException:
            self.close()
            raise

    @property
    def vocab_size(self) -> int:
        """Token ids the model embeds."""
        return cast("Tensor", self.model.get_input_embeddings().weight).shape[0]

    def new_store(self, *, pages: int, max_length: int, spare: int) -> DurableStore:
        """Allocate a durable store that fits the model."""
        return DurableStore(
            self.specs,
            pages=pages,
            max_length=max_length,
            spare=spare,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        store: DurableStore,
        tokens: Sequence[int],
        segments: Sequence[Segment],
        sink: Sink,
        keep: Sequence[int] | None = None,
        earlier: Earlier | None = None,
    ) -> Tensor:
        """Run one step.

        Args:
            store: durable rows to read.
            tokens: the new tokens, request after request.
            segments: whose they are.
            sink: where their rows go.
            keep: rows whose logits are wanted; None for all.
            earlier: rows that are staged already, see `Step`.

        Returns:
            Logits ``[rows kept, vocab]`` in the model's dtype.
        """
        device = self.model.device
        ids = torch.tensor([list(tokens)], device=device)
        positions = torch.tensor(
            [[p for s in segments for p in range(s.start, s.start + s.length)]], device=device
        )
        call: dict[str, object] = {STEP_ARGUMENT: Step(store, segments, sink, earlier)}
        rows = None if keep is None else torch.tensor(list(keep), device=device)
        if self._cuts_logits and rows is not None:
            call["logits_to_keep"] = rows
        logits: Tensor = self.model(ids, position_ids=positions, use_cache=False, **call).logits[0]
        return logits if rows is None or self._cuts_logits else logits[rows]

    @torch.inference_mode()
    def _own_logits(self) -> Tensor:
        ids, positions = self._check_input()
        logits: Tensor = self.model(ids, position_ids=positions, use_cache=False).logits[0]
        return logits[-3:].float()

    def _check_input(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size = self.model.config.get_text_config().vocab_size
        ids = torch.randint(0, size, (1, _CHECK_TOKENS), generator=generator)
        return ids.to(self.model.device), torch.arange(_CHECK_TOKENS, device=self.model.device)[
            None
        ]

    def _check(self, own: Tensor) -> None:
        """Compare a prefill and a verify step with the model's own forward."""
        store = self.new_store(pages=1, max_length=_CHECK_TOKENS, spare=3)
        ids = self._check_input()[0][0].tolist()
        prompt, rest = Segment(0, 0, _CHECK_TOKENS - 3), Segment(0, _CHECK_TOKENS - 3, 3)
        self.forward(store, ids[:-3], [prompt], WriteThrough(store, [prompt], Written()), [0])
        ours = self.forward(store, ids[-3:], [rest], WriteThrough(store, [rest], Written())).float()
        error = float((ours - own).norm() / (own - own.mean(-1, keepdim=True)).norm())
        limit = _TOLERANCE.get(self.model.dtype, 0.2)
        if not error <= limit:
            raise UnsupportedModelError(
                f"{self.model.config.model_type}: logits differ from the model's own by {error:.2g} "
                f"(relative; limit {limit:.2g}): it does something the engine does not know"
            )

    def close(self) -> None:
        """Give the model its previous attention back."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
