"""A corpus on disk as a stream of pieces of documents, in an order and cut that depend on the files alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.data.chat import COMPLETION, MESSAGES, PROMPT, Template, completion, conversation
from shoal.data.pieces import PIECE_CHARS, Cut, Piece, cut, text_file
from shoal.data.records import Record, jsonl, parquet, parquet_columns
from shoal.errors import DataError, nearest, setting

Kind = Literal["text", "chat", "completion"]

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_FIELDS: dict[Kind, tuple[str, ...]] = {"chat": (MESSAGES,), "completion": (PROMPT, COMPLETION)}
_STRINGS = ("string", "large_string", "string_view")


@dataclass(frozen=True)
class Corpus:
    """Files of documents. Make one with ``Corpus.find``.

    A line of JSONL (``*.jsonl``) or a row of Parquet (``*.parquet``) is a document: its ``field``, or a conversation
    (``kind`` "chat": ``messages``, each of a role and a content), or a prompt and its completion ("completion"). Any
    other file is text: a document a file, or with ``separator`` what lies between its occurrences. Texts of nothing
    but white space are left out. ``fields`` are the fields read of each file, none of a text file.
    """

    files: tuple[Path, ...]
    size: int
    kind: Kind
    fields: tuple[tuple[str, ...], ...]
    separator: str | None = None

    @staticmethod
    def find(path: Path, *, field: str | None = None, separator: str | None = None) -> Corpus:
        """The corpus in a file, or in all ``*.txt``, ``*.jsonl`` and ``*.parquet`` in and under a folder, by path.

        Without ``field`` the names of the first record of each file say what it holds: conversations, prompts and
        completions, or texts (in ``text``, or in the only column of strings). ``size`` is in bytes.

        Raises DataError when there is no such file, no byte or record in them, no such field, and when files with a
        loss mask lie beside others.
        """
        if separator == "":
            raise DataError(setting("data.separator", "''", "separates nothing", "leave it out, or give a text"))
        files = _files(path)
        size = sum(file.stat().st_size for file in files)
        if size == 0:
            raise DataError(f"{path}: empty; name a text with something in it")
        fields = tuple(_fields(file, field) if file.stat().st_size else () for file in files)
        kinds = {kind: file for file, names in zip(files, fields, strict=True) if (kind := _kind(file, names))}
        if not kinds:
            raise DataError(f"{path}: no line with a record in it; each line must be one JSON object")
        (kind, first), *others = kinds.items()
        if others:
            problem = f"{first} holds {_SAYS[kind]}, {others[0][1]} {_SAYS[others[0][0]]}"
            raise DataError(f"{path}: {problem}; make a store of each, and mix them with [[data.sources]]")
        return Corpus(tuple(files), size, kind, fields, separator)

    def pieces(self, limit: int = PIECE_CHARS, template: Template | None = None) -> Iterator[Piece]:
        """Every document, texts over ``2 * limit`` characters in several pieces, so that memory is bounded.

        ``template`` writes conversations, and ends completions. Raises DataError, naming file and line, row or byte,
        for what is not UTF-8, not JSON, or not of the kind.
        """
        before = 0
        for file, fields in zip(self.files, self.fields, strict=True):
            yield from self._of(file, fields, limit, before, template)
            before += file.stat().st_size

    def _of(
        self, file: Path, fields: tuple[str, ...], limit: int, before: int, template: Template | None
    ) -> Iterator[Piece]:
        if self.kind == "text":
            cuts = (
                _texts(_records(file, fields), fields[0], limit) if fields else text_file(file, self.separator, limit)
            )
            for text, ends, read in cuts:
                yield Piece(text, ends, before + read)
            return
        assert template is not None, "conversations and completions need a template"
        for record in _records(file, fields):
            read = before + record.bytes_read
            if self.kind == "chat":
                yield from conversation(record, template, read)
            else:
                yield from completion(record, template.end, read)


_SAYS: dict[Kind, str] = {"text": "text", "chat": "conversations", "completion": "prompts and completions"}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; name a text, a .jsonl, a .parquet, or a folder of them")
    found = (file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
    files = sorted(found, key=lambda file: file.relative_to(path).parts)
    if not files:
        raise DataError(f"{path}: no {', '.join('*' + suffix for suffix in _SUFFIXES)} in this folder")
    return files


def _fields(file: Path, field: str | None) -> tuple[str, ...]:
    """The fields to read of a file; none of a text file, or of one without a record."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return _parquet_fields(file, field)
    if suffix != ".jsonl":
        return ()
    first = next(jsonl(file), None)
    if first is None:
        return ()
    return (field,) if field is not None else _known(first.values) or ("text",)


def _parquet_fields(file: Path, field: str | None) -> tuple[str, ...]:
    columns = parquet_columns(file)
    has = ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "none"
    if field is not None and field not in columns:
        raise DataError(f"{file}: no column '{field}'{nearest(field, columns)}; its columns are {has}")
    if known := (field,) if field is not None else _known(columns):
        return known
    strings = [name for name, kind in columns.items() if kind in _STRINGS]
    if len(strings) != 1:
        problem = "no column of text" if not strings else "several columns of text"
        raise DataError(f"{file}: {problem}; its columns are {has}; choose one with --field")
    return (strings[0],)


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """The fields that say by their names what they hold."""
    for fields in (*_FIELDS.values(), ("text",)):
        if set(fields) <= set(names):
            return fields
    return ()


def _kind(file: Path, fields: tuple[str, ...]) -> Kind | None:
    """What a file holds; None of one that holds nothing."""
    if not fields:
        return "text" if file.suffix.lower() not in (".jsonl", ".parquet") else None
    return next((kind for kind, names in _FIELDS.items() if names == fields), "text")


def _records(file: Path, fields: tuple[str, ...]) -> Iterator[Record]:
    if not fields:
        return iter(())
    return parquet(file, fields) if file.suffix.lower() == ".parquet" else jsonl(file)


def _texts(records: Iterable[Record], field: str, limit: int) -> Iterator[Cut]:
    for record in records:
        text = record.text(field)
        if text.strip():
            yield from cut(text, limit, record.bytes_read)
