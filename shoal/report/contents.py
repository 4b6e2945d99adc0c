"""What a token store or a checkpoint holds, for people and for scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from shoal import checkpoint
from shoal.data.megatron import index_path
from shoal.data.store import TokenStore
from shoal.data.tokenize import load_tokenizer
from shoal.errors import ConfigError

Progress = Callable[[int, int], None]
_SAMPLE_TOKENS = 60


@dataclass
class Contents:
    """``facts`` about the thing at ``path``, None where one is not recorded; ``tensors`` maps names to full shapes;
    ``text`` is a piece of a store."""

    path: Path
    kind: str
    facts: dict[str, Any]
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    text: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "kind": self.kind, **self.facts, "tensors": dict(self.tensors)}

    def table(self) -> RenderableType:
        facts = Table(title=f"{self.kind} {escape(str(self.path))}", title_justify="left", show_header=False, box=None)
        for name, value in self.facts.items():
            shown = "not recorded" if value is None else f"{value:,}" if isinstance(value, int) else escape(str(value))
            facts.add_row(name.replace("_", " "), shown)
        parts: list[RenderableType] = [facts]
        if self.tensors:
            weights = Table("weight", "shape", "elements", box=None, pad_edge=False)
            for name, shape in self.tensors.items():
                weights.add_row(escape(name), " × ".join(map(str, shape)) or "scalar", f"{prod(shape):,}")
            parts.append(weights)
        if self.text is not None:
            parts.append(f"[dim]it begins:[/]\n{escape(self.text)}")
        return Group(*parts)


def contents(path: Path, verify: Progress | None = None) -> Contents:
    """What lies at ``path``: a token store, a checkpoint, or a run folder, whose newest checkpoint is shown.

    With ``verify``, which is called with (bytes read, bytes in all), everything is read and its checksums compared.
    Raises a :class:`~shoal.errors.ShoalError` when something is damaged or nothing is there.
    """
    path = path.absolute() if path.name in ("", "..") else path
    if (path / "meta.json").exists() or index_path(path).exists() or path.suffix in (".bin", ".idx"):
        return _store(path, verify)
    if not path.exists():
        raise ConfigError(f"{path}: nothing there; name a token store, a run's folder or a checkpoint")
    return _checkpoint(path, verify)


def _store(path: Path, verify: Progress | None) -> Contents:
    store = TokenStore.open(path)
    if verify is not None:
        store.verify(verify)
    facts = {**store.as_json(), "token_type": str(store.tokens.dtype), "checksums": _checked(verify)}
    del facts["path"]
    text = None
    if store.tokenizer_path is not None:
        text = load_tokenizer(store.tokenizer_path).decode(store.tokens[:_SAMPLE_TOKENS].tolist())
    return Contents(path, "token store", facts, text=text)


def _checkpoint(path: Path, verify: Progress | None) -> Contents:
    found = checkpoint.resolve(path)
    manifest = checkpoint.read_manifest(found)
    if verify is not None:
        checkpoint.verify(found, verify)
    meta: Any = manifest.meta
    weights = manifest.tensors.get("weight", {})
    shapes = {name: weights[name].shape for name in sorted(weights, key=_by_number)}
    facts = {
        "step": manifest.step,
        "parameters": sum(prod(shape) for shape in shapes.values()),
        "dtype": ", ".join(sorted({tensor.dtype for tensor in weights.values()})),
        "states": ", ".join(sorted(manifest.tensors.keys() - {"weight"})) or "none",
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files.values()),
        "run": meta.get("config", {}).get("run", {}).get("name", "unknown"),
        "checksums": _checked(verify),
    }
    return Contents(found, "checkpoint", facts, shapes)


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _checked(verify: Progress | None) -> str:
    return "not read; use --verify" if verify is None else "all match"
