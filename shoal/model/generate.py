"""Text, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shoal.model.context import Cache
from shoal.model.decoder import Decoder

Decode = Callable[[list[int]], Tensor]
"""Takes the tokens that follow those it was given before, and returns the logits [vocabulary] of what comes next."""


def decoding(model: Decoder) -> Decode:
    """A whole model as it decodes one text. Keys and values of past positions are kept, so a token costs one
    position's work."""
    cache = Cache()

    def decode(tokens: list[int]) -> Tensor:
        training = model.training
        model.eval()
        with torch.no_grad():
            given = torch.tensor([tokens], device=next(model.parameters()).device)
            logits = model.decode(given, cache, newest=True)[0, 0]
        model.train(training)
        return logits

    return decode


def generate(
    decode: Decode,
    prompt: list[int],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    stop: int | None = None,
    known: int | None = None,
) -> Iterator[int]:
    """Up to ``tokens`` tokens that follow the (non-empty) ``prompt``, as they are drawn; ends before ``stop``.

    Each is drawn from the ``top_k`` likeliest (all, if 0) at ``temperature``; temperature 0 takes the likeliest. Only
    the first ``known`` entries of the vocabulary are candidates: a model may have more rows than its tokenizer has
    entries.
    """
    assert prompt, "something must come before the first token"
    generator = torch.Generator().manual_seed(seed)
    given = prompt
    for _ in range(tokens):
        token = _draw(decode(given)[:known].float().cpu(), temperature, top_k, generator)
        if token == stop:
            return
        yield token
        given = [token]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
