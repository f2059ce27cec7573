"""The embedded engine: batched speculative decoding for transformers models, on one machine.

Rows of drafts are staged, attention reads durable and staged rows, and one commit makes the accepted
rows of all layers durable. Needs the extra ``nwor[engine]``.
"""

from nwor.engine.core import Engine, TokenRun
from nwor.engine.drafters import (
    AssistantDrafter,
    Drafter,
    EngineSizes,
    NoDrafter,
    PromptLookup,
    Proposal,
)
from nwor.engine.errors import ModelLoadError, UnsupportedModelError
from nwor.engine.generate import Chunk, Output, Result, Stream, generate, stream
from nwor.engine.loading import Loaded, load
from nwor.engine.options import Options, Sampling
from nwor.engine.request import FinishReason, Request
from nwor.engine.stats import EngineStats

__all__ = [
    "AssistantDrafter",
    "Chunk",
    "Drafter",
    "Engine",
    "EngineSizes",
    "EngineStats",
    "FinishReason",
    "Loaded",
    "ModelLoadError",
    "NoDrafter",
    "Options",
    "Output",
    "PromptLookup",
    "Proposal",
    "Request",
    "Result",
    "Sampling",
    "Stream",
    "TokenRun",
    "UnsupportedModelError",
    "generate",
    "load",
    "stream",
]
