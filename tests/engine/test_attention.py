"""Durable ⊕ staged attention against a plain masked softmax over concatenated K and V."""

import pytest
import torch

from nwor.attention import Visibility, attend, fold_heads, merge, unfold_heads


def plain(query, key, value, visible, scale, softcap=None, sinks=None):
    """The specification: float64, one softmax, heads repeated, a sink as one more logit."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (t.double() for t in (query, key, value))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights @ value


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("durable", [0, 1, 17])
@pytest.mark.parametrize("window", [None, 5, 2])
def test_merged_parts_equal_one_softmax(dtype, softcap, with_sinks, kv_heads, durable, window):
    torch.manual_seed(durable + kv_heads)
    rows, heads, dim, scale = 4, 4, 16, 0.3
    query = random(2, heads, rows, dim, dtype=dtype)
    key, value = (random(2, kv_heads, durable + rows, dim, dtype=dtype) for _ in range(2))
    sinks = random(heads, dtype=dtype) if with_sinks else None
    distance = durable + torch.arange(rows)[:, None] - torch.arange(durable + rows)[None, :]
    visible = (distance >= 0) & (distance < (window or 10**6))
    expected = plain(query, key, value, visible, scale, softcap, sinks)

    options = {"scale": scale, "softcap": softcap}
    parts = [
        attend(query, key[:, :, cut], value[:, :, cut], **options,
               visibility=Visibility.of(visible[:, cut], dtype))
        for cut in (slice(0, durable), slice(durable, None))
    ]  # fmt: skip
    out = merge(parts[0] if durable else None, parts[1], sinks)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_causal_equals_its_mask(softcap):
    torch.manual_seed(0)
    query, key, value = (random(1, 4, 6, 8), random(1, 2, 6, 8), random(1, 2, 6, 8))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    part = attend(query, key, value, scale=0.5, causal=True, softcap=softcap)
    torch.testing.assert_close(
        part.out.double(), plain(query, key, value, visible, 0.5, softcap), rtol=1e-5, atol=1e-5
    )


def test_no_rows_weigh_nothing():
    """A flash kernel dies with SIGFPE here."""
    query = random(1, 2, 3, 8)
    none = attend(query, random(1, 2, 0, 8), random(1, 2, 0, 8), scale=1.0)
    assert none.lse.eq(float("-inf")).all()
    own = attend(query, key := random(1, 2, 3, 8), key, scale=1.0, causal=True)
    torch.testing.assert_close(merge(none, own), own.out)


def test_blind_rows_weigh_nothing():
    """A flash kernel reports 0 as the log-sum-exp of a row that sees nothing."""
    query, key = random(1, 1, 2, 8), random(1, 1, 3, 8)
    visible = torch.tensor([[True, True, True], [False, False, False]])
    part = attend(query, key, key, scale=1.0, visibility=Visibility.of(visible, torch.float32))
    assert part.lse[0, 0, 1] == float("-inf")
    assert part.out[0, 0, 1].eq(0).all()


def test_rows_beyond_the_slice_are_not_read():
    query, key = random(1, 1, 2, 8), torch.full((1, 1, 9, 8), float("nan"))
    key[:, :, :4] = random(1, 1, 4, 8)
    out = attend(query, key[:, :, :4], key[:, :, :4], scale=1.0).out
    assert out.isfinite().all()


def test_fold_and_unfold():
    query = random(2, 6, 3, 4)
    folded = fold_heads(query, 2)
    assert folded.shape == (2, 2, 9, 4)
    assert torch.equal(folded[1, 1, 3 + 2], query[1, 3 + 1, 2])
    assert torch.equal(unfold_heads(folded, 6, 3), query)
