"""Drafters: guesses of the next tokens, behind one small interface."""

from nwor.engine.drafters.assistant import AssistantDrafter
from nwor.engine.drafters.base import Drafter, EngineSizes, NoDrafter, Proposal
from nwor.engine.drafters.lookup import PromptLookup

__all__ = [
    "AssistantDrafter",
    "Drafter",
    "EngineSizes",
    "NoDrafter",
    "PromptLookup",
    "Proposal",
]
