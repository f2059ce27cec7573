"""The demo's lanes, table and page, on a tiny model."""

import io

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from engine import models
from nwor.demo.lanes import LANES, compare
from nwor.demo.prompts import Prompt
from nwor.engine import Loaded

pytest.importorskip("matplotlib", reason="pip install 'nwor[demo]'")

from nwor.demo.report import tables, write_page


def test_lanes_agree_and_are_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    loaded = Loaded(models.tiny("llama"), tokenizer)
    prompts = [Prompt("one", "abcabcabc"), Prompt("two", "<hello>")]
    told: list[str] = []
    comparisons = [
        compare(loaded, "one", prompts[:1], 12, 3, told.append),
        compare(loaded, "both", prompts, 12, 3, told.append),
    ]
    assert [lane.name for lane in comparisons[1].lanes] == list(LANES)
    assert all(c.identical for c in comparisons)
    assert len(told) == 2 * len(LANES)
    for width, parts in ((140, 1), (80, 2)):
        console = Console(width=width, record=True, file=io.StringIO())
        shown = tables(comparisons, width)
        assert len(shown) == parts
        console.print(*shown)
        text = console.export_text()
        assert "…" not in text
        assert all(lane.name in text for lane in comparisons[0].lanes)
    page = write_page(comparisons, "float32")
    assert page.count("<svg") == 3
    assert "abcabcabc<b>" in page
    comparisons[0].lanes[3].tokens[0][0] += 1
    assert not comparisons[0].identical
    assert "NO" in write_page(comparisons, "float32")
