"""Drafters: guesses of the next tokens, behind one protocol."""

from nwor.engine.drafters.base import Drafter, NoDrafter, Proposal
from nwor.engine.drafters.lookup import PromptLookup

__all__ = ["Drafter", "NoDrafter", "PromptLookup", "Proposal"]
