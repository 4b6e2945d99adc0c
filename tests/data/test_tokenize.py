from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from shoal.data import tokenize as tokenize_module
from shoal.data.corpus import Corpus
from shoal.data.store import TokenStore
from shoal.data.tokenize import byte_tokenizer, load_tokenizer, tokenize, train_tokenizer
from shoal.errors import DataError

LINE = "In the beginning God created the heaven and the earth.\n"


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def text_of(store: TokenStore, tokenizer: Tokenizer) -> list[str]:
    bounds = store.documents.tolist()
    documents = [store.tokens[a:b].tolist() for a, b in pairwise(bounds)]
    assert all(document[-1] == store.eod for document in documents)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_the_byte_tokenizer_is_the_bytes(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode()), skip_special_tokens=False) == text


def test_the_byte_tokenizer_has_three_special_tokens_more() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.get_vocab_size() == 259
    names = ("<|endoftext|>", "<|bos|>", "<|pad|>")
    assert [tokenizer.token_to_id(name) for name in names] == [256, 257, 258]


def test_a_trained_tokenizer_has_the_size_asked_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 10 + "Grüße, 🐟\n")
    corpus = Corpus.find(tmp_path)
    tokenizer = train_tokenizer(corpus, 280)
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.to_str() == train_tokenizer(corpus, 280).to_str()
    ids = tokenizer.encode("ünseen 字\r\n").ids
    assert tokenizer.decode(ids) == "ünseen 字\r\n"
    assert len(tokenizer.encode(LINE).ids) < len(LINE)


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE)
    with pytest.raises(DataError, match=r"data\.tokenizer_vocab = 256: .*at least 257"):
        train_tokenizer(Corpus.find(tmp_path), 256)


def test_documents_come_back_from_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("one||two\n||drei ü 🐟")
    (folder / "b.jsonl").write_text(json.dumps({"text": "four||still four"}) + "\n")
    store = tokenize(Corpus.find(folder, separator="||"), saved(byte_tokenizer(), tmp_path), tmp_path / "store")
    assert text_of(store, byte_tokenizer()) == ["one", "two\n", "drei ü 🐟", "four||still four"]
    assert (store.vocab, store.eod, store.tokens.dtype) == (259, 256, np.uint16)
    store.verify()


def test_the_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_module, "_TASK_CHARS", 300)
    monkeypatch.setattr(tokenize_module, "_WORKER_BYTES", 300)
    (tmp_path / "a.txt").write_text((LINE * 3 + "||") * 20)
    corpus = Corpus.find(tmp_path / "a.txt", separator="||")
    tokenizer = saved(train_tokenizer(corpus, 300), tmp_path)
    calls: list[tuple[int, int]] = []
    one = tokenize(corpus, tokenizer, tmp_path / "one", workers=1)
    two = tokenize(
        corpus,
        tokenizer,
        tmp_path / "two",
        workers=2,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert len(one.documents) == 21
    for name in ("tokens.bin", "documents.bin", "tokenizer.json", "meta.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert one.fingerprint == two.fingerprint
    assert calls == sorted(calls)
    assert calls[-1] == (corpus.size, corpus.size)
    assert len(calls) > 5


def test_cutting_a_long_document_does_not_change_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text((LINE * 7 + "\n") * 30)
    corpus = Corpus.find(tmp_path / "a.txt")
    tokenizer = train_tokenizer(corpus, 350)
    pieces = Corpus.pieces
    monkeypatch.setattr(Corpus, "pieces", lambda self, **rest: pieces(self, 500, **rest))
    store = tokenize(corpus, saved(tokenizer, tmp_path), tmp_path / "store")
    assert len(list(corpus.pieces())) > 10
    assert store.tokens.tolist() == [*tokenizer.encode((tmp_path / "a.txt").read_text()).ids, 0]
    assert store.documents.tolist() == [0, len(store)]


def test_a_special_token_named_in_the_text_ends_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before<|endoftext|>after")
    store = tokenize(Corpus.find(tmp_path), saved(byte_tokenizer(), tmp_path), tmp_path / "store")
    assert store.tokens.tolist() == [*b"before<|endoftext|>after", 256]


def test_truncation_padding_and_templates_of_the_tokenizer_are_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_id=258, pad_token="<|pad|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 257)])
    (tmp_path / "a.txt").write_text("longer than four")
    store = tokenize(Corpus.find(tmp_path), saved(tokenizer, tmp_path), tmp_path / "store")
    assert store.tokens.tolist() == [*b"longer than four", 256]


def test_the_end_of_a_document_is_any_token_by_name_or_id(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    corpus, tokenizer = Corpus.find(tmp_path), saved(byte_tokenizer(), tmp_path)
    assert tokenize(corpus, tokenizer, tmp_path / "a", end_of_document="<|bos|>").tokens.tolist() == [
        120,
        257,
    ]
    assert tokenize(corpus, tokenizer, tmp_path / "b", end_of_document=258).tokens.tolist() == [120, 258]
    with pytest.raises(DataError, match=r"end_of_document = <\|eos\|>: .*did you mean '<\|bos\|>'"):
        tokenize(corpus, tokenizer, tmp_path / "c", end_of_document="<|eos|>")
    for token in (259, -1):
        with pytest.raises(DataError, match=f"end_of_document = {token}: no such token"):
            tokenize(corpus, tokenizer, tmp_path / "c", end_of_document=token)


def test_a_tokenizer_that_changed_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE)
    corpus = Corpus.find(tmp_path)
    first = tokenize(corpus, saved(byte_tokenizer(), tmp_path), tmp_path / "a")
    second = tokenize(corpus, saved(train_tokenizer(corpus, 280), tmp_path), tmp_path / "b")
    assert len(second) < len(first)


def test_a_bad_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"t\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")


def test_bad_input_leaves_no_store(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot json\n')
    (tmp_path / "b.txt").write_text(" \n ")
    tokenizer = saved(byte_tokenizer(), tmp_path)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        tokenize(Corpus.find(tmp_path / "a.jsonl"), tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match="no text"):
        tokenize(Corpus.find(tmp_path / "b.txt"), tokenizer, tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.txt", "tokenizer.json"]


def test_an_existing_store_is_kept_unless_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    corpus, tokenizer = Corpus.find(tmp_path / "a.txt"), saved(byte_tokenizer(), tmp_path)
    tokenize(corpus, tokenizer, tmp_path / "store")
    (tmp_path / "a.txt").write_text("longer")
    with pytest.raises(DataError, match="exists already"):
        tokenize(Corpus.find(tmp_path / "a.txt"), tokenizer, tmp_path / "store")
    store = tokenize(Corpus.find(tmp_path / "a.txt"), tokenizer, tmp_path / "store", overwrite=True)
    assert len(store) == 7


def test_a_worker_that_is_killed_ends_the_work_with_a_message() -> None:
    with pytest.raises(DataError, match=r"process was killed.*use fewer workers"):
        list(tokenize_module._map_in_order(os._exit, iter([3, 3, 3]), 2))
