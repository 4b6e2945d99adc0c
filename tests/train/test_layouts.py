"""A run whose model is in pieces: what it says, and what it leaves, is what one process would say and leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import Shoal, events, make_store, sets, write_run

from shoal import checkpoint
from shoal.data.tokenize import load_tokenizer
from shoal.model.generate import decoding, generate
from shoal.train.folder import TOKENIZER
from shoal.train.speak import load_model

PROMPT, TOKENS = "In the", 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


@pytest.mark.parametrize("line", ["pp=2,tp=2,mb=2", "dp=2,tp=2:1d-sp,zero=3"])
def test_a_model_in_pieces_trains_and_shows_a_sample(shoal: Shoal, store: Path, tmp_path: Path, line: str) -> None:
    file, run = write_run(tmp_path, store), tmp_path / "out" / "run"
    settings = sets(run__steps=4, run__sample=PROMPT, run__sample_tokens=TOKENS, evaluation__batches=1)
    result = shoal("train", file, "--layout", line, *settings)
    assert (result.code, result.err) == (0, "")
    (start,) = events(run, "start")
    assert start["ranks"] == 4
    assert start["parameters"] == json.loads(shoal("inspect", run, "--json").out)["parameters"]
    (sample,) = events(run, "sample")
    assert sample["prompt"] == PROMPT
    assert sample["text"] == alone(run)
    assert PROMPT in result.out
    assert sample["text"].splitlines()[0] in result.out


def alone(run: Path) -> str:
    """What the saved model says in one process."""
    found = checkpoint.latest(run)
    assert found is not None
    tokenizer = load_tokenizer(run / TOKENIZER)
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    drawn = generate(decoding(load_model(found)), ids, tokens=TOKENS, known=tokenizer.get_vocab_size())
    return str(tokenizer.decode(list(drawn)))


def test_a_model_with_learned_positions_says_as_much_as_it_has_positions_for(
    shoal: Shoal, store: Path, tmp_path: Path
) -> None:
    file, run = write_run(tmp_path, store), tmp_path / "out" / "run"
    learned = sets(model__positions="learned", model__max_positions=32, run__sample=PROMPT, run__sample_tokens=100)
    result = shoal("train", file, *sets(run__steps=1, evaluation__batches=1), *learned)
    assert (result.code, result.err) == (0, "")
    assert len(events(run, "sample")) == 1
    ids = len(load_tokenizer(run / TOKENIZER).encode(PROMPT).ids)
    assert shoal("generate", run, "--prompt", PROMPT, "--tokens", 33 - ids).code == 0
    refused = shoal("generate", run, "--prompt", PROMPT, "--tokens", 34 - ids)
    assert refused.code != 0
    assert "the model has learned no position for a text of 33 tokens" in refused.err
