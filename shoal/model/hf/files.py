"""The files of a Hugging Face folder: which they are, and that they stay inside it.

A folder comes from a stranger. Only JSON and safetensors are read, which hold data and run no code; names in an index
cannot lead out of the folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shoal.model.hf.on_disk import OnDisk, bad, read_header

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Small files that an import keeps as they are, so that an export can give them back."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a Hugging Face folder, and no checkpoint of Shoal."""
    return (path / CONFIG).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises :class:`CheckpointError` naming the file."""
    try:
        found: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise bad(path, f"it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise bad(path, f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise bad(path, "it is not a JSON object")
    return found


def end_tokens(folder: Path) -> frozenset[int]:
    """The ids that end a text, as the folder's generation_config.json or config.json says; none if neither does."""
    for name in (GENERATION, CONFIG):
        if (folder / name).is_file() and (found := read_json(folder / name).get("eos_token_id")) is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in ids):
                raise bad(folder / name, f"eos_token_id is {found}, which is no id")
            return frozenset(ids)
    return frozenset()


def tensors_of(folder: Path) -> dict[str, OnDisk]:
    """The tensors of a folder's weight files, by name, from their headers alone.

    Raises :class:`CheckpointError` naming the file, and the tensor where there is one, when a file is missing,
    truncated, malformed or outside the folder, or when the index and the files contradict.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder, read_json(folder / INDEX))
    if (folder / WEIGHTS).exists():
        return read_header(inside(folder, WEIGHTS))
    if any(folder.glob("*.bin")):
        problem = "its weights are pickles, which can run code, and are not read"
        raise bad(folder, problem, f"save it as {WEIGHTS} with transformers")
    raise bad(folder, f"neither {WEIGHTS} nor {INDEX} is there")


def _indexed(folder: Path, index: dict[str, Any]) -> dict[str, OnDisk]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise bad(folder / INDEX, "it has no weight_map from tensors to files")
    names = sorted(set(where.values()))
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        raise bad(folder / INDEX, f"it names the file {wrong[0]!r}, which is no plain name of a safetensors file")
    files = {name: read_header(inside(folder, name)) for name in names}
    for tensor, file in where.items():
        if tensor not in files[file]:
            raise bad(folder / file, f"{tensor} is not in it, where {INDEX} says it is")
    for file, tensors in files.items():
        if lost := [tensor for tensor in tensors if where.get(tensor) != file]:
            raise bad(folder / file, f"{lost[0]} is in it and {INDEX} does not say so")
    return {tensor: files[file][tensor] for tensor, file in where.items()}


def inside(folder: Path, name: str) -> Path:
    """The file ``name`` of a folder. A link may lead to the folder itself or, in the cache that Hugging Face's tools
    keep, from a snapshot to the files it shares with others. Raises :class:`CheckpointError` for any other."""
    home, path = folder.resolve(), (folder / name).resolve()
    roots = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if path.parent not in roots:
        raise bad(folder / name, f"it is a link out of the folder, to {path}", "copy the file into the folder")
    if not path.is_file():
        raise bad(folder / name, "there is no such file", "fetch the whole model again")
    return path
