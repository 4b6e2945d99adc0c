"""A real model, SmolLM2-135M: in, compared with transformers, fine-tuned under several layouts, and out again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from smollm2 import smollm2
from whole_runs import Apart, Ended, events, sets

from shoal import checkpoint
from shoal.data.tokenize import load_tokenizer
from shoal.train.exporting import export_hf
from shoal.train.importing import import_hf
from shoal.train.speak import load_model

pytestmark = pytest.mark.slow
PARAGRAPH = (
    "The history of the steam engine begins in the first century, when a Greek engineer in Alexandria described a "
    "small hollow ball that spun as steam escaped from two bent pipes. For many hundreds of years it stayed a toy. In "
    "the seventeenth century, miners in England needed a way to pump water out of deep coal mines, and inventors began "
    "to build machines that used steam to do real work. Thomas Newcomen built the first engine that was widely used, "
    "and James Watt later made it far more efficient by adding a separate condenser."
)
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
LAYOUTS = ("dp=2,zero=3", "tp=3", "pp=2")
STEPS, WORDS = 20, 24


def quiet(what: str, done: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("transformers")
    return smollm2(request.config.cache.mkdir("smollm2"))


@pytest.fixture(scope="module")
def imported(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "smollm2"
    import_hf(theirs, out, quiet)
    return out


def shoal(tmp_path: Path, *arguments: object) -> Ended:
    return Apart(arguments, tmp_path / "said").end(600)


def test_the_loss_of_a_paragraph_is_that_of_transformers(theirs: Path, imported: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([load_tokenizer(theirs / "tokenizer.json").encode(PARAGRAPH).ids])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)(ids, labels=ids).loss.item()
        model = load_model(checkpoint.resolve(imported))
        batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "positions": torch.arange(ids.shape[1] - 1)[None]}
        loss = model(batch, model.context(batch)).item() / (ids.shape[1] - 1)
    assert 2.0 < loss < 4.0
    assert loss == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("prompt", [QUESTION, "Once upon a time, there was a little"])
def test_transformers_generates_the_text_that_shoal_does(
    theirs: Path, imported: Path, tmp_path: Path, prompt: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_hf(imported, tmp_path / "back", quiet)
    assert (tmp_path / "back" / "model.safetensors").stat().st_size < 280e6, "as it is stored: bfloat16, tied"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=WORDS, do_sample=False)[0, ids.shape[1] :]
    greedy = ["generate", imported, "--prompt", prompt, "--temperature", 0, "--tokens", WORDS, "--json"]
    text = json.loads(shoal(tmp_path, *greedy).out)["text"]
    assert text == tokenizer.decode(said, skip_special_tokens=True)
    assert len(text) > 20


def write_chats(path: Path) -> None:
    """Questions with answers of unlike lengths."""
    pairs = [
        ("capital", "Paris"),
        ("largest city", "Paris, by far"),
        ("currency", "the euro"),
        ("longest river", "Loire"),
    ]
    with path.open("w", encoding="utf-8") as file:
        for number in range(40):
            what, answer = pairs[number % 4]
            messages = [
                {"role": "user", "content": f"Question {number}: what is the {what} of France?"},
                {
                    "role": "assistant",
                    "content": f"The {what} of France is {answer}" + ", as you know" * (number % 5) + ".",
                },
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def test_fine_tuning_on_chats_is_the_same_under_every_layout(imported: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    tokenizer = ["--tokenizer", imported / "tokenizer.json", "--template", "chatml"]
    made = shoal(tmp_path, "data", tmp_path / "chats.jsonl", tmp_path / "chats.store", *tokenizer)
    assert (made.code, made.err) == (0, "")
    curves = {}
    for layout in LAYOUTS:
        settings = sets(
            run__folder=tmp_path, run__name=layout.replace("=", "-").replace(",", "-"), run__steps=STEPS,
            data__path=tmp_path / "chats.store", data__seq_len=64, data__batch=2, optimizer__lr=1e-4,
        )  # fmt: skip
        trained = shoal(tmp_path, "train", imported / "run.toml", *settings, "--layout", layout)
        assert (trained.code, trained.err) == (0, "")
        folder = tmp_path / layout.replace("=", "-").replace(",", "-")
        curves[layout] = [step["loss"] for step in events(folder, "step")]
        if layout != LAYOUTS[0]:
            shutil.rmtree(folder)  # 1.6 GB
    first = curves[LAYOUTS[0]]
    assert len(first) == STEPS
    assert first[-1] < 0.8 * first[0], "it learns"
    for layout in LAYOUTS[1:]:
        assert curves[layout] == pytest.approx(first, abs=1e-4), layout
    compare_after_training(tmp_path / "dp-2-zero-3", tmp_path)


def compare_after_training(run: Path, tmp_path: Path) -> None:
    """What has been fine-tuned goes out, and says the same in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_hf(run, tmp_path / "tuned", quiet)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=WORDS, do_sample=False)[0, ids.shape[1] :]
    greedy = ["generate", run, "--prompt", QUESTION, "--temperature", 0, "--tokens", WORDS, "--json"]
    assert json.loads(shoal(tmp_path, *greedy).out)["text"] == tokenizer.decode(said, skip_special_tokens=True)
    shutil.rmtree(run)
