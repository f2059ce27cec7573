"""`generate` and `stream`: prompts in, text and an account of every row out."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nwor.engine.core import Engine, TokenRun
from nwor.engine.drafters import AssistantDrafter, Drafter, NoDrafter, PromptLookup
from nwor.engine.loading import Loaded, load
from nwor.engine.options import Options, Sampling
from nwor.engine.request import FinishReason
from nwor.engine.stats import EngineStats
from nwor.engine.stopping import Decoder, text_until
from nwor.engine.text import TextStream
from nwor.errors import InputError
from nwor.metrics import Metrics

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step emitted for one prompt.

    Attributes:
        index: place of the prompt in the call.
        text: text that has become certain; empty without a tokenizer.
        drafted_text: its leading part that accepted drafts make up.
        token_ids: tokens.
        drafts: how many of them, from the first on, were accepted drafts.
        finish_reason: why the prompt ends with them, None if it goes on.
    """

    index: int
    text: str
    drafted_text: str
    token_ids: tuple[int, ...]
    drafts: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Output:
    """What was generated for one prompt.

    Attributes:
        prompt: as it was given.
        prompt_tokens: its tokens.
        text: generated text, cut before a stop string; empty without a tokenizer.
        token_ids: generated tokens, a stop token included.
        drafted: for each of them, whether it was an accepted draft.
        finish_reason: ``stop``, ``length`` or ``interrupted``.
    """

    prompt: Prompt
    prompt_tokens: int
    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: FinishReason


@dataclass(slots=True)
class Result:
    """What a call generated and what it cost.

    Attributes:
        outputs: one per prompt, in order.
        metrics: windows and rows, see `Metrics`.
        stats: steps, acceptance by position, times.
    """

    outputs: list[Output]
    metrics: Metrics
    stats: EngineStats

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted by windows, per second of decoding (prefill excluded)."""
        seconds = self.stats.decode_seconds
        return self.stats.decoded / seconds if seconds else 0.0


class Stream:
    """A running generation: iterate over it for chunks, then ask for the `result`.

    `close` (or leaving a ``with`` block) ends it early; the model gets its attention back and the
    result holds what has been emitted.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
        options: Options,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._engine, self._stops = engine, options.stop_strings
        # Transformers types what `decode` returns for batches too.
        self._decoder = cast("Decoder | None", tokenizer)
        self._prompts = prompts
        self._outputs = [
            Output(prompt, len(tokens), "", [], [], FinishReason.INTERRUPTED)
            for prompt, tokens in zip(prompts, ids, strict=True)
        ]
        self._texts = [
            TextStream(self._decoder, self._stops) if self._decoder else None for _ in ids
        ]
        try:
            self._chunks = self._run(engine.run(ids, options, self._decoder))
        except BaseException:
            engine.close()
            raise

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def _run(self, runs: Iterator[TokenRun]) -> Generator[Chunk]:
        try:
            for run in runs:
                yield self._chunk(run)
        finally:
            self._engine.close()

    def _chunk(self, run: TokenRun) -> Chunk:
        index, finish = run.request.index, run.request.finish
        output, text = self._outputs[index], self._texts[index]
        output.token_ids += run.tokens
        output.drafted += [at < run.drafts for at in range(len(run.tokens))]
        if finish is not None:
            output.finish_reason = finish
        drafted = piece = ""
        if text is not None:
            drafted = text.push(run.tokens[: run.drafts])
            piece = text.push(run.tokens[run.drafts :], final=finish is not None)
        return Chunk(index, drafted + piece, drafted, tuple(run.tokens), run.drafts, finish)

    @property
    def stats(self) -> EngineStats:
        """Counters so far."""
        return self._engine.stats

    @property
    def metrics(self) -> Metrics:
        """Windows and rows so far."""
        return self._engine.metrics

    def close(self) -> None:
        """End early."""
        self._chunks.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> Result:
        """What has been generated so far."""
        for output in self._outputs:
            if self._decoder is not None:
                text = self._decoder.decode(output.token_ids, skip_special_tokens=True)
                output.text = text_until(text, self._stops)
        return Result(self._outputs, self._engine.metrics, self._engine.stats)


def stream(
    model: str | PreTrainedModel | Loaded,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: str | Drafter = "prompt-lookup",
    mode: str = "stage",
    num_draft_tokens: int = 4,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int = 8,
    dtype: str = "auto",
) -> Stream:
    """Generate for all prompts, chunk by chunk; the arguments are those of `generate`."""
    given = _listed(prompts)
    options = Options(
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        sampling=Sampling(temperature, top_k, top_p, seed),
        stop_strings=tuple(stop),
    )
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    loaded = _loaded(model, tokenizer, dtype)
    ends = _end_ids(loaded) if stop_token_ids is None else frozenset(stop_token_ids)
    options = Options(
        options.max_new_tokens,
        options.num_draft_tokens,
        options.sampling,
        ends,
        options.stop_strings,
    )
    ids = [_encoded(index, prompt, loaded.tokenizer) for index, prompt in enumerate(given)]
    if not ids:
        raise InputError("no prompts")
    chosen = make_drafter(drafter, loaded, dtype)
    try:
        engine = Engine(
            loaded.model,
            drafter=chosen,
            mode=mode,
            max_batch=min(batch_size, len(ids)),
            max_length=max(map(len, ids)) + max_new_tokens,
            max_draft=num_draft_tokens,
        )
    except BaseException:
        chosen.close()
        raise
    return Stream(engine, given, ids, options, loaded.tokenizer)


def generate(
    model: str | PreTrainedModel | Loaded,
    prompts: Prompt | Sequence[Prompt],
    **arguments: Any,  # noqa: ANN401 - see `stream`
) -> Result:
    """Generate for all prompts.

    Args:
        model: a loaded causal model, a directory, or a model id.
        prompts: texts, or token ids; one or many.
        **arguments: as `stream` takes them:

            tokenizer: needed for texts if `model` is a loaded model.
            drafter: ``prompt-lookup``, ``none``, ``model:PATH_OR_ID``, or a `Drafter`.
            mode: ``stage``, ``immediate`` or ``off``.
            num_draft_tokens: most drafts per window.
            max_new_tokens: most tokens per prompt.
            temperature, top_k, top_p, seed: see `Sampling`.
            stop: strings that end a text.
            stop_token_ids: ids that end it; left out: the model's own end tokens.
            batch_size: prompts that run at a time.
            dtype: of a model that is loaded here; ``auto`` as stored.

    Raises:
        InputError: a value that is not acceptable; unsupported models among them.
    """
    with stream(model, prompts, **arguments) as running:
        for _ in running:
            pass
        return running.result


def make_drafter(drafter: str | Drafter, target: Loaded, dtype: str = "auto") -> Drafter:
    """Return the drafter called ``none``, ``prompt-lookup`` or ``model:PATH_OR_ID``.

    Raises:
        InputError: no such drafter, or an assistant with another vocabulary.
    """
    if isinstance(drafter, Drafter):
        return drafter
    if drafter == "none":
        return NoDrafter()
    if drafter == "prompt-lookup":
        return PromptLookup()
    kind, _, name = drafter.partition(":")
    if kind != "model" or not name:
        raise InputError(
            f"unknown drafter {drafter!r}; known: none, prompt-lookup, model:PATH_OR_ID"
        )
    assistant = load(name, dtype)
    ours, theirs = target.tokenizer, assistant.tokenizer
    if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
        raise InputError(f"the assistant {name!r} has another vocabulary than the target")
    return AssistantDrafter(assistant.model)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt, a text or ids, from many."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _loaded(
    model: str | PreTrainedModel | Loaded, tokenizer: PreTrainedTokenizerBase | None, dtype: str
) -> Loaded:
    if isinstance(model, str):
        loaded = load(model, dtype)
        return Loaded(loaded.model, tokenizer or loaded.tokenizer)
    if isinstance(model, Loaded):
        return model
    return Loaded(model, tokenizer)


def _end_ids(loaded: Loaded) -> frozenset[int]:
    """Return the tokens that end a text: the model's, else its tokenizer's."""
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    if configured is None and loaded.tokenizer is not None:
        configured = loaded.tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)


def _encoded(
    index: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None
) -> Sequence[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt:
        raise InputError(f"prompt {index} is empty: there is nothing to continue")
    if tokenizer is None:
        raise InputError(f"prompt {index} is text, and the model has no tokenizer: give token ids")
    ids: list[int] = tokenizer(prompt).input_ids
    return ids
