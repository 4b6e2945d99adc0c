"""Commands about token stores: data, data inspect."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import JsonOption, console, progress_bar
from shoal.errors import ConfigError


def make_data(
    text: Annotated[Path, typer.Argument(help="a .txt, .jsonl or .parquet file, or a folder of them")],
    out: Annotated[Path, typer.Argument(help="the token store to write, a new folder")],
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json to use")] = None,
    train_vocab: Annotated[int | None, typer.Option(help="or: train a BPE of so many entries on it", min=257)] = None,
    separator: Annotated[str | None, typer.Option(help="what stands between documents of a text file")] = None,
    field: Annotated[str | None, typer.Option(help="the field or column that holds the text; default: found")] = None,
    template: Annotated[str | None, typer.Option(help="chatml, llama-3 or plain, for chats; default: found")] = None,
    end_of_document: Annotated[str, typer.Option(help="the token that ends a document")] = "<|endoftext|>",
    workers: Annotated[int | None, typer.Option(help="processes; default: one a CPU", min=1)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a store that is there")] = False,
    json: JsonOption = False,
) -> None:
    """Tokenise text, chats, or prompts and completions into a memory-mapped token store.

    Example: shoal data data/kjv.txt data/kjv.store --train-vocab 2048 --separator $'\\n\\n\\n'
    """
    if (tokenizer is None) == (train_vocab is None):
        raise ConfigError("shoal data: give either --tokenizer tokenizer.json or --train-vocab N, such as 2048")
    from shoal.report.samples import store_told
    from shoal.train.prepare import make_store

    with progress_bar(quiet=json) as progress:
        store = make_store(
            text, out, tokenizer=tokenizer, vocab=train_vocab, separator=separator, field=field, template=template,
            end_of_document=end_of_document, workers=workers, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    console.print(store_told(store)) if not json else typer.echo(jsonlib.dumps(store.as_json()))


def inspect_data(
    path: Annotated[Path, typer.Argument(metavar="STORE_OR_RUN", help="a token store, a run file or a run's folder")],
    count: Annotated[int, typer.Option("-n", help="documents or samples to show", min=0)] = 3,
    step: Annotated[int | None, typer.Option(help="the step of a run, from 0", min=0)] = None,
    json: JsonOption = False,
) -> None:
    """Show documents of a store, or the samples of a step, as text: what counts in the loss in colour.

    Example: shoal data inspect runs/quickstart.toml --step 7
    """
    from shoal.report.samples import look_told
    from shoal.train.samples import look

    found = look(path, count, step)
    console.print(look_told(found, console)) if not json else typer.echo(jsonlib.dumps(found.as_json()))
