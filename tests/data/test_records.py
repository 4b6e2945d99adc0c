from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from shoal.data.corpus import Corpus
from shoal.data.store import TokenStore
from shoal.data.tokenize import byte_tokenizer, tokenize
from shoal.errors import DataError


def write(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=300)
    return path


def texts(corpus: Corpus) -> list[str]:
    return [piece.text for piece in corpus.pieces()]


def test_a_column_of_text_is_found_or_chosen(tmp_path: Path) -> None:
    named = write(tmp_path / "a.parquet", id=[1, 2], text=["one", "two ü"], title=["A", "B"])
    assert texts(Corpus.find(named)) == ["one", "two ü"]
    assert texts(Corpus.find(named, field="title")) == ["A", "B"]
    assert texts(Corpus.find(write(tmp_path / "b.parquet", id=[1], body=["only"]))) == ["only"]


def test_many_rows_are_read_in_order_and_counted_as_bytes(tmp_path: Path) -> None:
    lines = [f"row {number}" for number in range(1000)]
    corpus = Corpus.find(write(tmp_path / "a.parquet", text=lines))
    read = [piece.bytes_read for piece in corpus.pieces()]
    assert texts(corpus) == lines
    assert read == sorted(read)
    assert read[-1] == corpus.size


@pytest.mark.parametrize(
    ("columns", "field", "message"),
    [
        ({"id": [1], "score": [0.5]}, None, r"no column of text; its columns are id \(int64\), score \(double\)"),
        ({"a": ["x"], "b": ["y"]}, None, r"several columns of text; .*a \(string\), b \(string\); .*--field"),
        ({"text": ["x"]}, "texts", r"no column 'texts' \(did you mean 'text'\?\); its columns are text \(string\)"),
    ],
)
def test_a_file_without_a_column_to_read_is_refused(
    columns: dict[str, list[Any]], field: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: " + message):
        Corpus.find(write(tmp_path / "a.parquet", **columns), field=field)


def test_a_row_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet, row 2: field 'text' is NoneType, not a string"):
        texts(Corpus.find(write(tmp_path / "a.parquet", text=["x", None])))


def test_what_is_no_parquet_or_is_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        Corpus.find(tmp_path / "a.parquet")
    file = write(tmp_path / "b.parquet", text=[f"{number:050}" for number in range(1000)])
    contents = bytearray(file.read_bytes())
    contents[100 : len(contents) // 2] = bytes(len(contents) // 2 - 100)
    file.write_bytes(contents)
    with pytest.raises(DataError, match=r"b\.parquet: damaged behind row \d+"):
        texts(Corpus.find(file))


def test_conversations_in_parquet_are_those_in_jsonl(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "t.json"))
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{n}"}] for n in range(5)]
    write(tmp_path / "a.parquet", messages=messages)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in messages))

    def store(name: str) -> TokenStore:
        return tokenize(Corpus.find(tmp_path / name), tmp_path / "t.json", tmp_path / f"{name}.store")

    assert store("a.parquet").fingerprint == store("a.jsonl").fingerprint


def test_files_of_several_kinds_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}], "text": "t"}\n')
    assert Corpus.find(tmp_path).kind == "chat"
    assert Corpus.find(tmp_path, field="text").kind == "text"
    (tmp_path / "b.jsonl").write_text("\n \n")
    assert Corpus.find(tmp_path).kind == "chat"
    write(tmp_path / "c.parquet", text=["x"])
    with pytest.raises(DataError, match=r"a\.jsonl holds conversations, .*c\.parquet text; make a store of each"):
        Corpus.find(tmp_path)
    with pytest.raises(DataError, match=r"b\.jsonl: no line with a record"):
        Corpus.find(tmp_path / "b.jsonl")
