"""Commands about what was trained: generate, inspect, import, export."""

from __future__ import annotations

import json as jsonlib
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.common import JsonOption, console, progress_bar


def generate_text(
    checkpoint: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
    prompt: Annotated[str, typer.Option(help="how the text begins")],
    tokens: Annotated[int, typer.Option(help="tokens to draw at most", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="draw from so many likeliest tokens; 0: all", min=0)] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Continue a text with a trained model.

    Example: shoal generate out/quickstart --prompt "And it came to pass"
    """
    from shoal.train.speak import speak

    words = speak(checkpoint, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if json:
        typer.echo(jsonlib.dumps({"prompt": prompt, "text": "".join(words)}))
        return
    typer.echo(prompt, nl=False)
    for word in words:
        typer.echo(word, nl=False)
    typer.echo()


def inspect(
    path: Annotated[Path, typer.Argument(help="a token store, a run's folder, or a checkpoint")],
    verify: Annotated[bool, typer.Option("--verify", help="read everything and compare checksums")] = False,
    json: JsonOption = False,
) -> None:
    """Show what a token store or a checkpoint holds.

    Example: shoal inspect out/quickstart --verify
    """
    from shoal.report.contents import contents

    with progress_bar(quiet=json) as progress:
        found = contents(path, partial(progress, f"reading {path}") if verify else None)
    if json:
        typer.echo(jsonlib.dumps(found.as_json()))
    else:
        console.print(found.table())


def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="a Hugging Face folder: config.json, safetensors")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the new folder")],
    json: JsonOption = False,
) -> None:
    """Make a checkpoint and a run file of a Hugging Face model: Llama, Mistral, Qwen 2 and 3, Gemma, GPT-2,
    Mixtral, Qwen 3 MoE, OLMoE, DeepSeek V2 and V3.

    Example: shoal import SmolLM2-135M out/smollm2
    """
    from shoal.train.importing import import_hf

    if not json:
        console.print(f"reading {escape(str(folder))} into {escape(str(out))}, a new folder")
    with progress_bar(quiet=json) as progress:
        made = import_hf(folder, out, progress)
    typer.echo(jsonlib.dumps(made.as_json()) if json else made.told())


def export_folder(
    checkpoint: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="the new Hugging Face folder")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64; default: as it is stored")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    Example: shoal export out/smollm2-tuned smollm2-tuned-hf --dtype bfloat16
    """
    from shoal.train.exporting import export_hf

    if not json:
        console.print(f"writing {escape(str(checkpoint))} to {escape(str(out))}, a new folder")
    with progress_bar(quiet=json) as progress:
        made = export_hf(checkpoint, out, progress, dtype=dtype)
    typer.echo(jsonlib.dumps(made.as_json()) if json else made.told())
