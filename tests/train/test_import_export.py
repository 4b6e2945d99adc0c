"""Hugging Face folders in and out: what transformers computes, Shoal computes, and gets back bit for bit."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import LLAMA_NAMES, TINY, VOCAB, edit_json, save_tiny, write_llama
from safetensors.torch import load_file
from tokenizers import processors
from torch import Tensor
from whole_runs import Shoal, events, refused, sets

from shoal import checkpoint, config
from shoal.data.corpus import Corpus
from shoal.data.store import TokenStore
from shoal.data.tokenize import byte_tokenizer, tokenize, train_tokenizer
from shoal.errors import CheckpointError, ConfigError, DataError, ShoalError
from shoal.model.decoder import Decoder
from shoal.model.hf import Weights
from shoal.train.exporting import export_hf
from shoal.train.importing import import_hf
from shoal.train.speak import load_model, speak

TOKENS = 40
SYNTHETIC = sets(data__source="synthetic", data__seq_len=16, data__batch=2, run__steps=2)
"""Two steps on random tokens: for runs that are about weights."""


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(one: Path, other: Path) -> None:
    """The weights of two folders have the same names, dtypes, shapes and bits."""
    before, after = tensors(one), tensors(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    batch = {"tokens": tokens, "positions": torch.arange(tokens.shape[1]).expand_as(tokens)}
    with torch.no_grad():
        return model(batch, model.context(batch))


@dataclass(frozen=True)
class Round:
    """A tiny model of transformers, and the folders of its import and export."""

    theirs: Any
    folder: Path
    imported: Path
    exported: Path


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Round]:
    pytest.importorskip("transformers")
    made: dict[str, Round] = {}

    def of(name: str) -> Round:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = Round(save_tiny(name, root / "hf"), root / "hf", root / "shoal", root / "back")
            import_hf(made[name].folder, made[name].imported, quiet)
            export_hf(made[name].imported, made[name].exported, quiet)
        return made[name]

    return of


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(rounds: Callable[[str], Round], name: str) -> None:
    one, tokens = rounds(name), torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = one.theirs(tokens).logits
    assert expected.std() > 0.3, "a model that says something"
    torch.testing.assert_close(
        logits(load_model(checkpoint.resolve(one.imported)), tokens), expected, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", TINY)
def test_the_way_there_and_back_changes_no_bit_and_transformers_loads_it(
    rounds: Callable[[str], Round], name: str
) -> None:
    from transformers import AutoModelForCausalLM

    one = rounds(name)
    assert_same(one.folder, one.exported)
    assert (one.exported / "tokenizer.json").read_bytes() == (one.folder / "tokenizer.json").read_bytes()
    generation = json.loads((one.exported / "generation_config.json").read_bytes())
    assert generation == json.loads((one.folder / "generation_config.json").read_bytes())
    tokens = torch.arange(TOKENS)[None]
    again = AutoModelForCausalLM.from_pretrained(one.exported, dtype="auto")
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, one.theirs(tokens).logits)
    for key in ("eos_token_id", "initializer_range"):
        assert getattr(again.config, key) == getattr(one.theirs.config, key)


@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_dtypes_stay_and_files_are_divided(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    save_tiny(name, tmp_path / "hf", dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    made = import_hf(tmp_path / "hf", tmp_path / "in", quiet)
    assert made.dtypes == ("bfloat16",)
    exported = export_hf(tmp_path / "in", tmp_path / "out", quiet, shard_bytes=15_000)
    assert len(exported.files) > 2
    assert_same(tmp_path / "hf", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    export_hf(tmp_path / "in", tmp_path / "half", quiet, dtype="float16")
    assert {tensor.dtype for tensor in tensors(tmp_path / "half").values()} == {torch.float16}
    assert json.loads((tmp_path / "half" / "config.json").read_bytes())["torch_dtype"] == "float16"


def test_greedy_text_is_that_of_transformers_and_ends_where_it_ends(rounds: Callable[[str], Round]) -> None:
    one, prompt = rounds("llama3"), "In the beginning"
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(prompt).ids
    whole = one.theirs.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None)
    said = whole[0, len(ids) :].tolist()
    assert "".join(speak(one.imported, prompt, tokens=30, temperature=0)) == tokenizer.decode(said).rstrip("\ufffd")
    at, stop = next((at, token) for at, token in enumerate(said) if at and token not in said[:at])
    (one.imported / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, stop]}))
    short = "".join(speak(one.imported, prompt, tokens=30, temperature=0))
    assert short == tokenizer.decode(said[:at]).rstrip("\ufffd")


# Without transformers


def test_the_commands_say_what_there_is_and_what_comes_next(shoal: Shoal, llama: Path, tmp_path: Path) -> None:
    imported = shoal("import", llama, tmp_path / "in")
    assert (imported.code, imported.err) == (0, "")
    for words in (
        f"reading {llama}",
        "llama, 4,",
        "parameters in float32",
        f"shoal train {tmp_path / 'in' / 'run.toml'}",
    ):
        assert words in imported.out
    exported = shoal("export", tmp_path / "in", tmp_path / "out")
    assert (exported.code, exported.err) == (0, "")
    for words in ("LlamaForCausalLM, float32, in model.safetensors", "from_pretrained("):
        assert words in exported.out
    assert_same(llama, tmp_path / "out")


def test_the_commands_for_scripts(shoal: Shoal, llama: Path, tmp_path: Path) -> None:
    imported = json.loads(shoal("import", llama, tmp_path / "in", "--json").out)
    assert imported["family"] == "llama"
    assert imported["tensors"] == len(LLAMA_NAMES)
    assert imported["run"] == str(tmp_path / "in" / "run.toml")
    exported = json.loads(shoal("export", tmp_path / "in", tmp_path / "out", "--dtype", "bfloat16", "--json").out)
    assert (exported["dtype"], exported["files"]) == ("bfloat16", ["model.safetensors"])
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3", "tp=2"])
def test_the_run_file_asks_for_data_and_then_trains(shoal: Shoal, llama: Path, tmp_path: Path, layout: str) -> None:
    import_hf(llama, tmp_path / "in", quiet)
    run = tmp_path / "in" / "run.toml"
    asked = shoal("train", run)
    assert asked.code == 2
    for words in ("data.path = in-data.store", "there is no token store", "shoal data"):
        assert words in asked.err
    how = f"--tokenizer {tmp_path / 'in' / 'tokenizer.json'}"
    assert how in asked.err
    assert how in run.read_text(encoding="utf-8")
    still = sets(run__folder=tmp_path, optimizer__lr=1e-30)
    trained = shoal("train", run, *SYNTHETIC, *still, "--layout", layout)
    assert (trained.code, trained.err) == (0, "")
    export_hf(tmp_path / "in-tuned", tmp_path / "out", quiet)
    assert_same(llama, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["eos_token_id"] == 2
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


def test_a_text_is_read_with_the_tokenizer_of_the_weights(shoal: Shoal, llama: Path, tmp_path: Path) -> None:
    edit_json(llama / "config.json", eos_token_id=258)
    import_hf(llama, tmp_path / "in", quiet)
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 90)
    store = tmp_path / "made.store"
    short = sets(data__text=text, data__path=store, data__seq_len=16, data__batch=2, run__steps=1, run__folder=tmp_path)
    trained = shoal("train", tmp_path / "in" / "run.toml", *short, *sets(run__sample="In the", run__sample_tokens=2))
    assert (trained.code, trained.err) == (0, "")
    assert f"beginning with the weights of {tmp_path / 'in'}" in trained.out
    made = TokenStore.open(store)
    assert made.tokenizer_path is not None
    assert made.tokenizer_path.read_bytes() == (llama / "tokenizer.json").read_bytes()
    assert made.tokens[-1] == 258


def test_a_run_may_begin_with_the_folder_itself_and_goes_on_from_its_own(
    shoal: Shoal, llama: Path, tmp_path: Path
) -> None:
    import_hf(llama, tmp_path / "in", quiet)
    moving = sets(run__folder=tmp_path, optimizer__lr=1e-2, checkpoint__start=llama, schedule__kind="constant")
    assert shoal("train", tmp_path / "in" / "run.toml", *SYNTHETIC, *moving, "--set", "run.stop=1").code == 0
    first = events(tmp_path / "in-tuned", "step")[0]["loss"]
    assert shoal("train", tmp_path / "in" / "run.toml", *SYNTHETIC, *moving).code == 0
    steps = events(tmp_path / "in-tuned", "step")
    assert [step["step"] for step in steps] == [1, 2]
    model = config.load(tmp_path / "in" / "run.toml", [*SYNTHETIC, *moving][1::2])
    assert model.checkpoint.start == llama
    assert steps[0]["loss"] == first
    assert (tmp_path / "in-tuned" / "hf" / "config.json").exists()


TEXT = "In the beginning was the word. " * 90


def test_a_run_goes_on_without_the_weights_that_it_began_with(shoal: Shoal, llama: Path, tmp_path: Path) -> None:
    edit_json(llama / "config.json", eos_token_id=258)
    import_hf(llama, tmp_path / "in", quiet)
    run, text, store = tmp_path / "run.toml", tmp_path / "text.txt", tmp_path / "made.store"
    shutil.copyfile(tmp_path / "in" / "run.toml", run)
    text.write_text(TEXT)
    settings = sets(data__text=text, data__path=store, data__seq_len=16, data__batch=2, run__folder=tmp_path)

    def trained(step: int) -> None:
        result = shoal("train", run, *settings, *sets(run__steps=4, run__stop=step))
        assert (result.code, result.err) == (0, "")
        assert len(events(tmp_path / "in-tuned", "step")) == step

    trained(1)
    shutil.rmtree(tmp_path / "in")
    trained(2)
    shutil.rmtree(store)
    trained(3)
    assert TokenStore.open(store).eod == 258, "made again with the tokenizer that the run has kept"
    refused(shoal("train", run, *settings, "--fresh"), f"checkpoint = {tmp_path / 'in'}: no checkpoint is there")


@pytest.mark.parametrize("layout", ["dp=1", "tp=2"])
def test_the_text_that_ends_a_run_is_what_generate_says(shoal: Shoal, llama: Path, tmp_path: Path, layout: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 257)])
    tokenizer.save(str(llama / "tokenizer.json"))
    import_hf(llama, tmp_path / "in", quiet)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    data = sets(data__text=text, data__path=tmp_path / "made.store", data__seq_len=16, data__batch=2)
    short = sets(run__folder=tmp_path, run__steps=1, run__sample="In the", run__sample_tokens=40)

    def said(name: str) -> str:
        command = ("train", tmp_path / "in" / "run.toml", *data, *short, *sets(run__name=name), "--layout", layout)
        assert shoal(*command).code == 0
        (sample,) = events(tmp_path / name, "sample")
        assert sample["text"] == "".join(speak(tmp_path / name, "In the", tokens=40))
        return str(sample["text"])

    whole = said("whole")
    edit_json(tmp_path / "in" / "hf" / "config.json", eos_token_id=list(range(128)))
    ended = said("ended")
    assert whole.startswith(ended)
    assert not any(character.isascii() for character in ended)
    assert len(ended) < len(whole)


def test_an_import_holds_one_tensor_beside_the_one_it_writes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, held, most = Weights.read, weakref.WeakSet[Tensor](), 0

    def watched(self: Weights, *box: Any) -> Tensor:
        nonlocal most
        tensor = read(self, *box)
        held.add(tensor)
        most = max(most, len(held))
        return tensor

    monkeypatch.setattr(Weights, "read", watched)
    import_hf(llama, tmp_path / "in", quiet)
    assert most == 2


def lacks_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def has_a_larger_tokenizer(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=258)
    stored = load_file(folder / "model.safetensors")
    from safetensors.torch import save_file

    cut = {name: tensor[:258].clone() if len(tensor) == VOCAB else tensor for name, tensor in stored.items()}
    save_file(cut, folder / "model.safetensors")


def ends_with_no_token(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=262)


def has_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("harm", "kind", "named"),
    [
        (lacks_weights, CheckpointError, "neither model.safetensors"),
        (has_a_larger_tokenizer, DataError, "vocab_size = 258"),
        (ends_with_no_token, DataError, "eos_token_id = 262"),
        (has_a_broken_tokenizer, DataError, "not a tokenizer.json"),
    ],
)
def test_an_import_that_cannot_be_leaves_nothing(
    llama: Path, tmp_path: Path, harm: Callable[[Path], None], kind: type[ShoalError], named: str
) -> None:
    harm(llama)
    with pytest.raises(kind, match=named):
        import_hf(llama, tmp_path / "in", quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_what_exists_is_left_alone(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "in", quiet)
    (tmp_path / "mine").mkdir()
    for work in (lambda: import_hf(llama, tmp_path / "mine", quiet), lambda: export_hf(tmp_path / "in", llama, quiet)):
        with pytest.raises(ConfigError, match="exists already and is left alone"):
            work()
    assert list((tmp_path / "mine").iterdir()) == []


def test_an_export_that_fails_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "in", quiet)
    weights = next((tmp_path / "in").glob("step-*/part-00000.safetensors"))
    contents = bytearray(weights.read_bytes())
    contents[-5] ^= 1
    weights.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"part-00000\.safetensors.*checksum"):
        export_hf(tmp_path / "in", tmp_path / "out", quiet)
    with pytest.raises(ConfigError, match=r"--dtype = float3.*did you mean 'float32'"):
        export_hf(tmp_path / "in", tmp_path / "out", quiet, dtype="float3")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_or_tokenizer_are_refused_before_training(
    shoal: Shoal, llama: Path, tmp_path: Path
) -> None:
    import_hf(llama, tmp_path / "in", quiet)
    run, folder = tmp_path / "in" / "run.toml", sets(run__folder=tmp_path)
    other = shoal("train", run, *SYNTHETIC, *folder, *sets(model__ffn=12))
    assert other.code == 2
    for words in ("checkpoint.start", "blocks.0.ffn.gate.weight", "(11, 8)", "(12, 8)"):
        assert words in other.err
    (tmp_path / "text.txt").write_text("In the beginning was the word. " * 90)
    corpus = Corpus.find(tmp_path / "text.txt")
    train_tokenizer(corpus, 259).save(str(tmp_path / "other.json"))
    tokenize(corpus, tmp_path / "other.json", tmp_path / "other.store", workers=1)
    short = sets(data__path=tmp_path / "other.store", data__seq_len=16, data__batch=2)
    mixed = shoal("train", run, *short, *folder)
    assert mixed.code == 2
    for words in ("data.path", "another tokenizer than", "tokenizer.json"):
        assert words in mixed.err
    assert not (tmp_path / "in-tuned").exists()
