"""From a Hugging Face folder: into a checkpoint with a run file, or straight into an engine."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import tomli_w
import torch

from shoal.build import DTYPES
from shoal.checkpoint.hf import write_checkpoint
from shoal.comm.world import World
from shoal.config import Config, Model, Optimizer, parse
from shoal.data.tokenize import load_tokenizer
from shoal.engine import Engine
from shoal.errors import DataError, setting
from shoal.layout import Layout
from shoal.model.decoder import Decoder
from shoal.model.hf import Weights, end_tokens, inside
from shoal.train.folder import TOKENIZER, check_absent, made_whole
from shoal.train.prepare import Progress
from shoal.train.start import copy_companions

RUN = "run.toml"
_LONGEST = 1024


@dataclass(frozen=True)
class Imported:
    """What an import has made, at ``out``: ``dtypes`` are those that were stored."""

    out: Path
    family: str
    parameters: int
    tensors: int
    dtypes: tuple[str, ...]
    tokenizer: Path | None
    end_of_text: str | None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out), "run": str(self.out / RUN), "tokenizer": self._tokenizer()}

    def told(self) -> str:
        """What there is now, and what to do next."""
        return (
            f"{self.out}: {self.family}, {self.parameters:,} parameters in {', '.join(self.dtypes)}\n"
            f"next: name your data in {self.out / RUN}, then shoal train {self.out / RUN}"
            + (f'\n      shoal generate {self.out} --prompt "Once"' if self.tokenizer else "")
        )

    def _tokenizer(self) -> str | None:
        return str(self.tokenizer) if self.tokenizer else None


def import_hf(folder: Path, out: Path, progress: Progress) -> Imported:
    """Make of a Hugging Face folder a new folder ``out`` with a checkpoint of step 0, its tokenizer and a run file.

    A tensor at a time is in memory beside the one that is written; dtypes stay as they are. Raises, before anything is
    written, :class:`~shoal.errors.ConfigError` where ``out`` exists or the model is none that Shoal has,
    :class:`~shoal.errors.CheckpointError` for damaged or mismatched weights, and :class:`~shoal.errors.DataError` for a
    tokenizer that does not suit them.
    """
    check_absent(out)
    weights = Weights(folder)
    tokenizer = inside(folder, TOKENIZER) if (folder / TOKENIZER).exists() else None
    end = _end_of_text(folder, tokenizer, weights.model) if tokenizer else None
    text = _run_file(weights, out, end)
    config = parse(tomllib.loads(text))
    with made_whole(out) as aside:
        copy_companions(folder, aside)
        if tokenizer:
            shutil.copyfile(tokenizer, aside / TOKENIZER)
        (aside / RUN).write_text(text, encoding="utf-8")
        write_checkpoint(aside, weights, _memory(config, folder), partial(progress, f"importing {folder}"))
    return Imported(
        out=out,
        family=weights.family.name,
        parameters=sum(map(prod, weights.shapes.values())),
        tensors=len(weights.shapes),
        dtypes=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in weights.dtypes.values()})),
        tokenizer=out / TOKENIZER if tokenizer else None,
        end_of_text=end,
    )


def load_hf(
    folder: str | Path,
    layout: str | Layout,
    *,
    optimizer: Optimizer | None = None,
    rate: Callable[[int], float] = lambda _: 1.0,
    seed: int = 0,
    world: World | None = None,
) -> Engine:
    """An engine with the model of a Hugging Face folder, under ``layout``: each rank reads what it holds, into place.

    Raises what :class:`~shoal.engine.Engine` raises, :class:`~shoal.errors.ConfigError` where config.json is of a model
    that Shoal has not, and :class:`~shoal.errors.CheckpointError` for damaged or mismatched weights.
    """
    folder, layout = Path(folder), Layout.parse(layout) if isinstance(layout, str) else layout
    shape, world = Weights(folder).model, world or World()
    filled = layout.fill(world.size)
    filled.check(shape, filled.dp * filled.mb, world.size)
    with torch.device("meta"):
        model = Decoder(shape).to(DTYPES[layout.dtype])
    engine = Engine(model, filled, optimizer=optimizer, rate=rate, seed=seed, world=world)
    engine.load(folder, states=False)
    return engine


def _memory(config: Config, folder: Path) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json", exclude_none=True), "imported": folder.name}


def _end_of_text(folder: Path, path: Path, model: Model) -> str | None:
    """The token that ends a text, by name, once tokenizer and model are known to have one vocabulary."""
    tokenizer = load_tokenizer(path)
    entries = 1 + max(tokenizer.get_vocab().values(), default=0)
    if entries > model.vocab:
        problem = f"{path} has {entries} entries"
        raise DataError(setting("vocab_size", model.vocab, problem, "see that both are of one model"))
    ends = sorted(end_tokens(folder))
    if lost := [end for end in ends if tokenizer.id_to_token(end) is None]:
        problem = f"{path} has no such token"
        raise DataError(setting("eos_token_id", lost[0], problem, "see that both are of one model"))
    return tokenizer.id_to_token(ends[0]) if ends else None


def _run_file(weights: Weights, out: Path, end: str | None) -> str:
    """A run file that begins with the imported weights and lacks nothing but data."""
    shape, name = weights.model, re.sub(r"[^A-Za-z0-9_-]", "-", out.absolute().name).strip("-") or "imported"
    positions = weights.config.get("max_position_embeddings")
    positions = positions if isinstance(positions, int) else shape.max_positions
    model = shape.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    store = f"{name}-data.store"
    ending = f" --end-of-document {quote(end)}" if end and end.isprintable() else ""
    how = f"# Made of the text that you name here (text = ...), or by: shoal data TEXT {store} \\\n"
    how += f"#     --tokenizer {out / TOKENIZER}{ending}"
    if not (weights.folder / TOKENIZER).is_file():
        how = f"# There was no {TOKENIZER} in the folder; text needs one, as transformers saves it."
    return "\n".join(
        [
            f"# {weights.family.name}, imported from {weights.folder.name!r}: name your data, then train it.",
            _section("run", {"name": f"{name}-tuned", "steps": 100}),
            _section("model", model),
            how,
            _section("data", {"path": store, "seq_len": min(_LONGEST, positions), "batch": 8}),
            _section("optimizer", {"lr": 2e-5, "weight_decay": 0.0}),
            _section("schedule", {"kind": "cosine", "warmup": 10}),
            _section("checkpoint", {"start": str(out)}),
            "# How the work is spread, such as dp = 2, tp = 2 or zero = 3; --layout replaces it.",
            "[layout]\n",
        ]
    )


def _section(name: str, values: dict[str, Any]) -> str:
    return tomli_w.dumps({name: values})
