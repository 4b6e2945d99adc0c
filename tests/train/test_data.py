"""Runs on conversations, on several sources, and with batches that grow."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from whole_runs import Shoal, events, make_store, refused, sets

from shoal import config as configuration
from shoal.comm.world import World
from shoal.data import samples
from shoal.data.batches import Batch, Batches
from shoal.data.corpus import Corpus
from shoal.data.tokenize import tokenize, train_tokenizer
from shoal.engine import Engine, StepResult
from shoal.errors import LayoutError
from shoal.layout import Layout
from shoal.model.loss import IGNORED
from shoal.train.loop import train
from shoal.train.pool import Pool
from shoal.train.prepare import prepare
from shoal.train.samples import open_splits
from shoal.train.setup import fit, open_data
from shoal.train.verify import verify

SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
CHAT = """
[run]
name = "chat"
folder = "{folder}"
steps = 3

[model]
layers = 2
hidden = 24
heads = 3
ffn = 40
vocab = 300

[data]
path = "{store}"
packing = "documents"
seq_len = 96
batch = 4
validation = 0.2

[optimizer]
clip = 0.5

[evaluation]
batches = 100

[log]
hashes = true

[layout]
dtype = "float64"
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of conversations of many lengths, one longer than a sample, one without an answer."""
    folder = tmp_path_factory.mktemp("chat")
    lines = []
    for number in range(60):
        question = {"role": "user", "content": f"What is {number}? " * (1 + number % 4)}
        answer = {"role": "assistant", "content": f"A number, {number}. " * (1 + number % (30 if number == 29 else 3))}
        lines.append(json.dumps({"messages": [question, answer] if number != 7 else [question]}))
    (folder / "chat.jsonl").write_text("\n".join(lines), encoding="utf-8")
    corpus = Corpus.find(folder / "chat.jsonl")
    train_tokenizer(corpus, 300).save(str(folder / "tokenizer.json"))
    tokenize(corpus, folder / "tokenizer.json", folder / "store")
    return folder / "store"


def run_file(folder: Path, store: Path) -> Path:
    path = folder / "chat.toml"
    path.write_text(CHAT.format(folder=folder / "out", store=store), encoding="utf-8")
    return path


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


def test_conversations_train_alike_in_one_process_and_two(shoal: Shoal, chat: Path, tmp_path: Path) -> None:
    """Samples differ in how much of them counts: a mean of means would differ."""
    found = []
    for name, line in (("one", "dp=1"), ("two", "dp=2,mb=2")):
        result = shoal("train", run_file(tmp_path, chat), "--layout", line, *sets(run__name=name))
        assert (result.code, result.err) == (0, "")
        assert f"{chat}: 100.0% of the samples; " in result.out
        assert "1 documents cut" in result.out
        found.append(tmp_path / "out" / name)
    one, two = ([(e["loss"], e["grad_norm"]) for e in events(folder, "step")] for folder in found)
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-11)
    hashes = [[event["hash"] for event in events(folder, "step")] for folder in found]
    assert hashes[0] == hashes[1]
    losses = [events(folder, "evaluation")[-1]["loss"] for folder in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def counting(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[None]:
    """One entry for each call of ``module.name`` from now on."""
    calls: list[None] = []
    original = getattr(module, name)

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(None)
        return original(*arguments, **more)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_a_store_is_packed_once_for_training_and_validation(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run is prepared, and in each rank."""
    config = configuration.load(run_file(tmp_path, chat))
    calls = counting(monkeypatch, samples, "pack")
    prepare(config, config.plan(), lambda *_: None)
    assert len(calls) == 1
    assert train(World(), config, config.plan(), tuple)["validation_loss"] is not None
    assert len(calls) == 2


def test_the_splits_are_those_that_are_opened_one_by_one(chat: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, chat)
    for settings in ([], ["data.batch_ramp=[[1,8]]"], ["data.source=synthetic", "data.packing=stream"]):
        config = configuration.load(file, settings)
        both = open_splits(config)
        for source, split in zip(both, SPLITS, strict=True):
            assert source is not None
            for step in (0, 1):
                expected = open_data(config, split).batch(step)
                assert all(torch.equal(tensor, expected[name]) for name, tensor in source.batch(step).items())
    assert open_splits(configuration.load(file, ["data.validation=0"]))[1] is None


def test_a_step_that_is_skipped_reads_no_more_than_another(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the samples are known without them."""
    read: list[int] = []
    batch, finished = Batches.batch, Engine.finished

    def reading(self: Batches, number: int, part: int = 0, parts: int = 1) -> Batch:
        read.append(number)
        return batch(self, number, part, parts)

    def skipping(self: Engine) -> list[StepResult]:
        return [replace(one, skipped=one.step == 2) for one in finished(self)]

    monkeypatch.setattr(Batches, "batch", reading)
    monkeypatch.setattr(Engine, "finished", skipping)
    config = configuration.load(run_file(tmp_path, chat), ["data.validation=0", "data.batch_ramp=[[1,6]]"])
    train(World(), config, config.plan(), tuple)
    assert read == [0, 1, 2]
    (skipped,) = events(tmp_path / "out" / "chat", "skipped")
    assert skipped["samples"] == list(range(4, 10)) == batch(open_data(config), 1)["sample"].tolist()


def test_the_tokenizer_of_a_run_is_that_of_the_first_store_that_keeps_one(chat: Path, tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    unknown.with_suffix(".bin").write_bytes(np.arange(200, dtype="<u2").tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    unknown.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", 200, 0, 0, 1))
    file, stores = run_file(tmp_path, chat), f'sources = [{{path = "{unknown}"}}, {{path = "{chat}"}}]'
    file.write_text(file.read_text().replace(f'path = "{chat}"', stores).replace("validation = 0.2", ""))
    config = configuration.load(file, ["run.steps=1"])
    train(World(), config, config.plan(), tuple)
    assert (tmp_path / "out" / "chat" / "tokenizer.json").read_bytes() == (chat / "tokenizer.json").read_bytes()


def test_every_sample_of_every_step_has_a_label_that_counts(chat: Path, tmp_path: Path) -> None:
    config = configuration.load(run_file(tmp_path, chat))
    shares = set()
    for split in ("train", "validation"):
        batches = open_data(config, split)
        assert isinstance(batches, Batches)
        for step in range(batches.n_samples // 4):
            counted = (batches.batch(step)["labels"] != IGNORED).sum(dim=1)
            assert (counted > 0).all()
            shares |= set(counted.tolist())
    assert len(shares) > 5


def test_a_layout_agrees_with_one_process_on_conversations(chat: Path, tmp_path: Path, pool: Pool) -> None:
    config = configuration.load(run_file(tmp_path, chat))
    assert config.data.documents
    report = verify(config, Layout.parse("dp=2,mb=2,dtype=float64"), pool, steps=2)
    assert report.agree, report.faults


def mixed(folder: Path, chat: Path, **settings: object) -> list[str]:
    """``--set`` that replace the path by two sources."""
    other = folder / "other"
    if not other.exists():
        text = folder / "text.txt"
        text.write_text("\n\n".join(f"Chapter {number}. " * 9 for number in range(90)), encoding="utf-8")
        tokenize(Corpus.find(text, separator="\n\n"), chat / "tokenizer.json", other)
    sources = f'[{{path = "{chat}", weight = 3}}, {{path = "{other}"}}]'
    file = run_file(folder, chat)
    file.write_text(file.read_text().replace(f'path = "{chat}"', f"sources = {sources}"), encoding="utf-8")
    return [str(file), *sets(**settings)]


def test_a_mixture_goes_on_where_it_stopped_under_another_layout(shoal: Shoal, chat: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    settings = {"run__steps": 6, "data__batch_ramp": "[[2,8]]"}
    assert shoal("train", *mixed(tmp_path, chat, run__name="whole", **settings), "--layout", "dp=1").code == 0
    parts = mixed(tmp_path, chat, run__name="parts", **settings)
    assert shoal("train", *parts, "--layout", "dp=2", *sets(run__stop=3)).code == 0
    result = shoal("train", *parts, "--layout", "dp=1,mb=2")
    assert "75.0% of the samples" in result.out
    whole, others = (events(tmp_path / "out" / name, "step") for name in ("whole", "parts"))
    assert [event["hash"] for event in others] == [event["hash"] for event in whole]
    assert [event["tokens"] for event in whole] == [96 * n for n in (4, 8, 16, 24, 32, 40)]
    assert [event["loss"] for event in others] == pytest.approx([event["loss"] for event in whole], rel=1e-9)
    # Other weights would be other samples.
    file = Path(parts[0])
    file.write_text(file.read_text().replace("weight = 3", "weight = 2"))
    refused(shoal("train", *parts), "data.sources = ", "was trained on other tokens")
    refused(shoal("train", *mixed(tmp_path, chat, run__name="parts", run__steps=6)), "data.batch_ramp = []", "[[2, 8]]")


def test_a_batch_of_the_ramp_that_the_layout_does_not_divide_is_refused(chat: Path, tmp_path: Path) -> None:
    config = configuration.load(run_file(tmp_path, chat), ["data.batch_ramp=[[3,6]]"])
    with pytest.raises(LayoutError, match="6"):
        fit(config, Layout.parse("dp=4"), 4)


def test_what_cannot_be_read_is_refused_before_any_work(shoal: Shoal, chat: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, chat)
    one, two = f'{{path="{chat}"}}', '{path="/no/where"}'

    def says(sources: str, *words: str) -> None:
        text = CHAT.format(folder=tmp_path / "out", store="").replace('path = ""', f"sources = [{sources}]")
        file.write_text(text, encoding="utf-8")
        refused(shoal("train", file), *words)

    says(f"{one},{two}", "data.sources.1.path = /no/where: there is no token store; make one with shoal data")
    says(f'{one},{{path="x",weight=0}}', "data.sources.1.weight = 0: input should be greater than 0")
    says(f'{one},{{path="x",wieght=1}}', "data.sources.1.wieght: unknown key (did you mean 'weight'?)")
    says(one.replace("}", ",weight=-1}"), "data.sources.0.weight = -1")
    file = run_file(tmp_path, chat)
    refused(shoal("train", file, *sets(data__sources=f"[{one}]")), f"data.path = {chat}: there are sources too")
    refused(
        shoal("train", file, *sets(data__batch_ramp="[[3,6],[2,8]]")), "data.batch_ramp = 2: does not come after step 3"
    )
    refused(shoal("train", file, *sets(data__validation=0.01)), "data.validation = 0.01: keeps none of the")
    assert not (tmp_path / "out").exists()


def test_inspect_shows_what_a_step_reads(shoal: Shoal, chat: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, chat)
    told = json.loads(shoal("data", "inspect", file, "-n", 2, "--step", 1, "--json").out)
    batch = open_data(configuration.load(file)).batch(1)
    assert [sample["number"] for sample in told["samples"]] == batch["sample"][:2].tolist()
    for sample, labels in zip(told["samples"], batch["labels"], strict=False):
        counted = [span for span in sample["spans"] if span["counts"]]
        assert sum(span["tokens"] for span in counted) == int((labels != IGNORED).sum())
        assert all(span["text"].startswith("A number") for span in counted)
        assert all(span["text"].endswith("<|im_end|>") for span in counted)
        assert sum(span["tokens"] for span in sample["spans"]) + sample["padded"] == 97
    (source,) = told["sources"]
    assert source["cut"] == 1
    assert 0 < source["counted"] < source["positions"]
    shown = shoal("data", "inspect", file, "-n", 1).out
    assert "── document ──\n<|im_start|>user\nWhat is" in shown
    assert "<|im_start|>assistant\n⟦A number" in shown
    assert f"sample 0 of {chat}: " in shown


def test_inspect_shows_the_documents_of_a_store(shoal: Shoal, chat: Path, tmp_path: Path) -> None:
    shown = shoal("data", "inspect", chat, "-n", 1)
    assert shown.out.startswith(f"document 0 of {chat}: ")
    assert "⟦A number, 0. <|im_end|>⟧" in shown.out
    store = make_store(tmp_path, 3000)
    (document,) = json.loads(shoal("data", "inspect", store, "--json").out)["samples"]
    assert (document["left"], document["spans"][0]["tokens"]) == (2001, 1000)
    refused(shoal("data", "inspect", chat, "--step", 2), "--step = 2", "has no steps")
    refused(shoal("data", "inspect", tmp_path), f"{tmp_path}: neither a token store, nor a run file")
