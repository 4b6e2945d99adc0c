"""A model that was trained here goes out with its tokenizer, and ends where it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import Shoal, make_store, sets, write_run

from shoal.data.tokenize import load_tokenizer
from shoal.train.speak import Prompt, speak


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


def test_a_model_from_nothing_goes_out_with_its_tokenizer(shoal: Shoal, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = write_run(tmp_path, make_store(tmp_path))
    assert shoal("train", run, *sets(run__steps=2, data__batch=4), "--layout", "dp=2,dtype=float32").code == 0
    assert shoal("export", tmp_path / "out" / "run", tmp_path / "back").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = tokenizer("In the", return_tensors="pt").input_ids
    assert model.config.eos_token_id == tokenizer.eos_token_id == 256
    said = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    ours = "".join(speak(tmp_path / "out" / "run", "In the", tokens=9, temperature=0))
    assert tokenizer.decode(said).rstrip("\ufffd") == ours


def test_a_model_of_chats_goes_out_with_the_token_that_ends_a_turn(shoal: Shoal, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is the answer."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 60, encoding="utf-8")
    assert shoal("data", tmp_path / "chats.jsonl", tmp_path / "chats.store", "--train-vocab", 280).code == 0
    run = write_run(tmp_path, tmp_path / "chats.store")
    assert shoal("train", run, *sets(run__steps=1, model__vocab=280, data__batch=4, data__validation=0)).code == 0
    assert shoal("export", tmp_path / "out" / "run", tmp_path / "back").code == 0
    tokenizer = load_tokenizer(tmp_path / "back" / "tokenizer.json")
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_bytes())["eos_token_id"] == ends
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_bytes())["eos_token"] == "<|im_end|>"
    assert Prompt.of("What", tokenizer, tmp_path / "none").stops == sorted(ends)
