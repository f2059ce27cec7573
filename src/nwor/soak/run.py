"""Waves of traffic through an engine until the time is up or something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from nwor.soak.ledger import Check, Ledger
from nwor.soak.traffic import Traffic, Wave


class SoakEngine(Protocol):
    """An engine on a tiny model that looks at its own books."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Sizes, for the record."""

    @property
    def impossible(self) -> Mapping[str, str]:
        """By what a soak counts, why this engine never does it."""

    def traffic(self, seed: int) -> Traffic:
        """Return traffic that fits the engine's model."""

    def run(self, wave: Wave, traffic: Traffic, ledger: Ledger) -> None:
        """Run a wave; stop at the first violation."""

    def close(self) -> None:
        """Let go of the model."""


def soak(
    engine: SoakEngine, traffic: Traffic, ledger: Ledger, time_is_up: Callable[[], bool]
) -> None:
    """Run at least one wave; every wave is run to its end unless something is wrong.

    Args:
        engine: the engine.
        traffic: what to run.
        ledger: what happened is written here.
        time_is_up: asked between waves.
    """
    for wave in traffic.waves():
        ledger.begin(wave)
        try:
            engine.run(wave, traffic, ledger)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is a finding with a place
            ledger.broken(Check.RUNS, f"raised {type(error).__name__}: {error}")
        if ledger.violations or time_is_up():
            return
