"""Text from a saved model, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from shoal import checkpoint
from shoal.comm.world import World
from shoal.config import parse
from shoal.data.tokenize import load_tokenizer, own_ends
from shoal.errors import CheckpointError, ConfigError, setting
from shoal.local import allot, buffer_fragments, lay_out
from shoal.mesh import Grid
from shoal.model.context import check_room
from shoal.model.decoder import Decoder
from shoal.model.generate import Decode, decoding, generate
from shoal.model.hf import end_tokens
from shoal.tensor.whole import Whole
from shoal.train.folder import COMPANIONS, TOKENIZER
from shoal.train.setup import make_model


@dataclass(frozen=True)
class Prompt:
    """A text as a model takes it: its tokens ``ids``, any of ``stops`` ends what follows, and only the first ``known``
    entries of the vocabulary can."""

    ids: list[int]
    stops: list[int]
    known: int

    @staticmethod
    def of(text: str, tokenizer: Tokenizer, companions: Path) -> Prompt:
        """``companions`` is the folder of what a Hugging Face folder has besides weights, which need not exist."""
        ids = tokenizer.encode(text).ids  # an imported tokenizer may put a token of its own before a text
        stops = end_tokens(companions) or set(own_ends(tokenizer).values())
        return Prompt(ids, sorted(stops), 1 + max(tokenizer.get_vocab().values()))

    def continued(
        self, decode: Decode, *, tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0
    ) -> Iterator[int]:
        """Up to ``tokens`` tokens that follow, as :func:`~shoal.model.generate.generate` draws them."""
        drawn = generate(
            decode, self.ids, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, known=self.known
        )
        return takewhile(lambda token: token not in self.stops, drawn)


def load_model(path: Path) -> Decoder:
    """The whole model of one checkpoint, on the CPU. Raises :class:`CheckpointError` where it is damaged."""
    meta: Any = checkpoint.read_manifest(path).meta
    if "config" not in meta:
        problem = "it does not say which model it is of"
        raise CheckpointError(setting("checkpoint", path, problem, "name one that shoal train has saved"))
    config = parse(meta["config"])
    model, grid, device = make_model(config, config.plan()), Grid((("dp", 1),)), torch.device("cpu")
    held = lay_out(model, model.layers(), model.roles, Whole(), grid, grid.coords(0))
    parameters = allot(model, held, config.run.seed, device)
    for one in parameters:  # filled below: initial values would be drawn for nothing
        one.parameter.data = torch.empty(one.placement.shape, dtype=one.parameter.dtype)
    weights = [fragment for one in parameters for fragment in one.fragments("weight", one.parameter.detach())]
    checkpoint.load(path, weights + buffer_fragments(model, (0,)), World())
    return model


def speak(
    path: Path, prompt: str, *, tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> Iterator[str]:
    """What the model of a run folder (its newest checkpoint), or of one checkpoint, adds to ``prompt``, piece by piece.

    Raises, before the first piece, :class:`CheckpointError` where there is no usable checkpoint and
    :class:`ConfigError` for an empty prompt, and for a text that is longer than the positions the model has learned.
    """
    found = checkpoint.resolve(path)
    tokenizer_path = found.parent / TOKENIZER
    if not tokenizer_path.exists():
        raise CheckpointError(f"{tokenizer_path}: missing; text needs the tokenizer the model was trained with")
    tokenizer = load_tokenizer(tokenizer_path)
    asked = Prompt.of(prompt, tokenizer, found.parent / COMPANIONS)
    if not asked.ids:
        raise ConfigError(setting("--prompt", repr(prompt), "no tokens in it", 'give some text, such as "In the"'))
    model = load_model(found)
    check_room(model.shape, len(asked.ids) + tokens - 1)
    drawn = asked.continued(decoding(model), tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    return pieces(drawn, tokenizer)


def pieces(drawn: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of the tokens, as far as it is certain."""
    said: list[int] = []
    shown = ""
    for token in drawn:
        said.append(token)
        text = tokenizer.decode(said)
        if not text.endswith("\ufffd"):  # the bytes of a character may come in several tokens
            yield text[len(shown) :]
            shown = text
