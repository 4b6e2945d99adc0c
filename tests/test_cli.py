"""The commands, as a person or a script meets them: what they print and how they exit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import KJV, Apart, Ended, Shoal, events, flip, make_store, refused, sets, write_run

from shoal import config as configuration
from shoal.data.tokenize import byte_tokenizer
from shoal.train import verify as verification

COMMANDS = ("train", "verify", "layout", "schedule", "plan", "data", "generate", "inspect", "import", "export")
SHORT = sets(run__steps=3, checkpoint__every=2, evaluation__every=2, log__tensorboard="true")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def said(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The folder of a finished run of three steps, and what the command said."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = ["train", write_run(folder, store), *SHORT, "--set", "run.sample=In the"]
    return folder / "out" / "run", Apart(arguments, folder / "said").end(60)


@pytest.fixture
def trained(said: tuple[Path, Ended], tmp_path: Path) -> Path:
    """A copy of the finished run, where ``file`` expects its run."""
    shutil.copytree(said[0], tmp_path / "out" / "run")
    return tmp_path / "out" / "run"


@pytest.fixture
def shoal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shoal:
    return Shoal(capfd, monkeypatch)


@pytest.fixture
def file(store: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, store)


# train: what it says


def test_train_tells_a_person_its_course_and_what_to_do_next(said: tuple[Path, Ended]) -> None:
    run, result = said
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("run: ")
    for words in (
        "layout dp=2,dtype=float64 on 2 processes",
        "3 steps of 24 × 32 tokens",
        f"everything goes to {run}/",
    ):
        assert words in lines[0]
    for step in ("1", "2", "3"):
        (line,) = [line for line in lines if line.startswith(f"step {step}/3 ")]
        for words in ("loss ", "grad norm ", "lr ", "tokens/s", "iB", "left"):
            assert words in line
    assert f"  saved {run}/step-00000002" in lines
    assert "  validation loss" in result.out
    assert "In the" in result.out
    assert "final validation loss" in result.out
    next_steps = result.out.partition("What to try next:")[2]
    assert f"shoal generate {run}" in next_steps
    assert f"shoal inspect {run}" in next_steps
    assert f"shoal verify {run}/run.toml --layout dp=2,dtype=float64" in next_steps


def test_train_writes_tensorboard_when_asked(said: tuple[Path, Ended]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = EventAccumulator(str(said[0] / "tensorboard")).Reload()
    steps = written.Scalars("step/loss")
    assert [scalar.step for scalar in steps] == [1, 2, 3]
    losses = [values["loss"] for values in events(said[0], "step")]
    assert [scalar.value for scalar in steps] == pytest.approx(losses, rel=1e-6)
    assert [scalar.step for scalar in written.Scalars("evaluation/loss")] == [2, 3]


def test_train_tells_a_script_one_object_a_step(shoal: Shoal, file: Path) -> None:
    result = shoal("train", file, "--json", "--layout", "dp=2,mb=3", *sets(run__steps=3))
    assert (result.code, result.err) == (0, "")
    steps = [json.loads(line) for line in result.out.splitlines()]
    assert [one["step"] for one in steps] == [1, 2, 3]
    for one in steps:
        assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"} <= one.keys()
        assert one["tokens"] == one["step"] * 24 * 32
        assert one["tokens_per_s"] > 0
    assert [one["lr"] for one in steps] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])


def test_train_starts_as_many_processes_as_the_layout_has_ranks(shoal: Shoal, file: Path, tmp_path: Path) -> None:
    assert shoal("train", file, "--layout", "dp=3", *sets(run__steps=1)).code == 0
    assert shoal("train", file, "--layout", "dp=-1", *sets(run__steps=2)).code == 0
    assert shoal("train", file, "--layout", "dp=-1", "-n", 2, *sets(run__steps=3)).code == 0
    starts = events(tmp_path / "out" / "run", "start")
    assert [(start["ranks"], start["step"]) for start in starts] == [(3, 0), (1, 1), (2, 2)]


def test_a_run_that_stops_early_says_how_it_goes_on(shoal: Shoal, file: Path, tmp_path: Path) -> None:
    result = shoal("train", file, *sets(run__steps=5, run__stop=2))
    assert "stopped in 0:0" in result.out
    assert "after step 2 of 5, as run.stop says" in result.out
    (command,) = [line for line in result.out.splitlines() if "go on to step 5" in line]
    words = command.partition("shoal ")[2].split()
    assert shoal(*words).code == 0
    assert events(tmp_path / "out" / "run", "end")[-1]["step"] == 5


def test_a_folder_with_brackets_and_spaces_is_shown_as_it_is(shoal: Shoal, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a [bold] b"
    folder.mkdir()
    shutil.copytree(store, kept := folder / "s [red]")
    result = shoal("train", write_run(folder, kept), *sets(run__steps=1))
    run = folder / "out" / "run"
    assert f"everything goes to {run}/" in result.out
    assert f"shoal inspect '{run}'" in result.out
    assert f"checkpoint {run}" in shoal("inspect", run).out.replace("\n", "")
    refused(shoal("inspect", folder / "nothing"), f"{folder / 'nothing'}: nothing there")


def test_print_config_loads_back_to_the_same_configuration(shoal: Shoal, file: Path, tmp_path: Path) -> None:
    changes = sets(optimizer__lr=3e-4, run__sample='"say \\"[so]\\" \\u00e9"', layout__mb=3)
    result = shoal("train", file, "--print-config", *changes)
    assert (result.code, result.err) == (0, "")
    again = tmp_path / "again.toml"
    again.write_text(result.out, encoding="utf-8")
    config = configuration.load(again)
    assert config == configuration.load(file, changes[1::2])
    assert (config.optimizer.lr, config.run.sample) == (3e-4, 'say "[so]" é')
    assert shoal("train", again, "--print-config").out == result.out
    assert not (tmp_path / "out").exists()


# verify


def test_verify_agrees_and_tells_a_script(shoal: Shoal, file: Path) -> None:
    result = shoal("verify", file, "--layout", "dp=2,mb=2", "--steps", 2, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["agree"] is True
    assert (found["steps"], found["layout"]) == (2, "dp=2,mb=2,dtype=float64")
    assert found["max_rel"].keys() == {"loss", "grad_norm", "grad", "weight"}
    assert all(0 <= value < 1e-9 for value in found["max_rel"].values())


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_verify_exits_with_1_when_a_layout_disagrees(
    shoal: Shoal, file: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(verification, "TOLERANCE", {"float64": -1.0})
    result = shoal("verify", file, "--layout", "dp=2", "--steps", 1, *flags)
    assert (result.code, result.err) == (1, "")
    if flags:
        assert json.loads(result.out)["agree"] is False
        assert any(
            fault.startswith("gradient embed.table.weight differs") for fault in json.loads(result.out)["faults"]
        )
    else:
        assert "dp=2,dtype=float64 disagrees with one process:" in result.out
        assert "loss differs by" in result.out
        assert "more" in result.out.splitlines()[-1]


def test_verify_in_float32_says_what_would_prove_it(shoal: Shoal, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "TOLERANCE", {"float32": -1.0})
    result = shoal("verify", file, "--layout", "mb=2,dtype=float32", "--steps", 1, *sets(run__seed=3))
    assert (result.code, result.err) == (1, "")
    assert "mb=2 disagrees with one process in float64:" in result.out
    command = result.out.splitlines()[-1].split()
    assert command == [
        "shoal", "verify", str(file), "--layout", "mb=2,dtype=float64", "--set", "run.seed=3", "--steps", "1",
    ]  # fmt: skip


# layout


def test_layout_tells_a_person_who_holds_what(shoal: Shoal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = shoal("layout", "dp=2,tp=2:1d-sp,pp=2:1f1b,zero=3,mb=4", "--picture")
    assert (result.code, result.err) == (0, "")
    for words in (
        "dp=2,tp=2:1d-sp,pp=2,zero=3,mb=4 on 8 ranks",
        "which rank sits where",
        "stage 1 on ranks 4–7: blocks 4–7, head, 54% of the cost",
        "0: rows 0–31 · 1: rows 32–63",
        "picture: out/layout-dp2-tp2-1d-sp-pp2-zero3-mb4.svg",
    ):
        assert words in result.out
    drawn = (tmp_path / "out" / "layout-dp2-tp2-1d-sp-pp2-zero3-mb4.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<svg ")
    assert "--picture draws it" in shoal("layout", "dp=-1").out


def test_layout_tells_a_script_every_box(shoal: Shoal, file: Path, tmp_path: Path) -> None:
    result = shoal("layout", "pp=3,tp=2,mb=2", tmp_path / "a.svg", "--run", file, "--json")
    assert (result.code, result.err) == (0, "")
    boxes = json.loads(result.out)
    assert all(set(one) == {"weight", "shape", "kind", "box", "ranks", "stage"} for one in boxes)
    assert {"weight": "embed.table.weight", "shape": [259, 48], "kind": "weight", "box": [[0, 130], [0, 48]],
            "ranks": [0], "stage": 0} in boxes  # fmt: skip
    assert {rank for one in boxes for rank in one["ranks"]} == set(range(6))
    assert (tmp_path / "a.svg").exists()
    many = json.loads(shoal("layout", "dp=70", "--json").out)
    assert many[0]["ranks"] == list(range(70)), "scripts are told all"


def test_layout_refuses_what_does_not_fit_the_model_or_the_batch(shoal: Shoal, file: Path, tmp_path: Path) -> None:
    refused(shoal("layout", "tp=16"), "layout.tp = 16: 8 attention heads", "use tp=8", "name yours with --run RUN.toml")
    result = shoal("layout", "dp=5", "--run", file)
    refused(result, "layout.dp = 5: a global batch of 24")
    assert "--run" not in result.err
    refused(shoal("layout", "auto"), "layout = auto: nobody has chosen a layout here", "shoal train")
    refused(shoal("layout", "zero=9"), "layout.zero = 9")
    refused(shoal("layout", "dp=2", "tp=2"), "FILE.svg = tp=2: is not the name of an SVG file")
    refused(shoal("layout", "dp=2", "--run", tmp_path / "none.toml"), "there is no such file")


# data, generate, inspect


def test_data_makes_a_store_that_inspect_shows(shoal: Shoal, tmp_path: Path) -> None:
    text, tokenizer, out = tmp_path / "some.txt", tmp_path / "tokenizer.json", tmp_path / "some.store"
    text.write_bytes(KJV.read_bytes()[:20_000])
    byte_tokenizer().save(str(tokenizer))
    result = shoal("data", text, out, "--tokenizer", tokenizer)
    assert (result.code, result.err) == (0, "")
    for words in (
        f"{out}: 20,001 tokens in 1 documents, vocabulary 259",
        f'path = "{out}" under [data]',
        "at least 259",
    ):
        assert words in result.out
    shown = shoal("inspect", out, "--verify")
    for words in (f"token store {out}", "20,001", "all match", "In the beginning God created"):
        assert words in shown.out
    told = json.loads(shoal("inspect", out, "--json").out)
    assert (told["kind"], told["tokens"], told["vocabulary"]) == ("token store", 20_001, 259)
    assert told["checksums"].startswith("not read")
    refused(shoal("data", text, out, "--tokenizer", tokenizer), f"{out}: exists already", "overwrite")
    again = shoal("data", text, out, "--train-vocab", 300, "--separator", "\n", "--overwrite", "--json")
    assert again.code == 0
    told = json.loads(again.out)
    assert (told["path"], told["vocabulary"]) == (str(out), 300)
    assert told["documents"] > 1
    shown = json.loads(shoal("inspect", out, "--json").out)
    assert {key: shown[key] for key in told} == told, "one name for one fact"
    flip(out / "tokens.bin")
    refused(shoal("inspect", out, "--verify"), f"{out / 'tokens.bin'}: CRC-32 is")


def test_data_takes_conversations_and_says_how_much_of_them_counts(shoal: Shoal, tmp_path: Path) -> None:
    chats, out = tmp_path / "chats.jsonl", tmp_path / "chats.store"
    turns = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
    chats.write_text("\n".join([json.dumps({"messages": turns})] * 9), encoding="utf-8")
    result = shoal("data", "make", chats, out, "--train-vocab", 270)
    assert (result.code, result.err) == (0, "")
    assert "18 of the tokens (" in result.out
    assert ") count in the loss; written as chatml" in result.out
    assert json.loads(shoal("inspect", out, "--json").out)["tokens_that_count"] == 18
    told = json.loads(shoal("data", chats, out, "--train-vocab", 270, "--overwrite", "--json").out)
    assert (told["tokens_that_count"], told["template"], told["documents"]) == (18, "chatml", 9)
    again = ("data", chats, tmp_path / "other", "--tokenizer", out / "tokenizer.json", "--template")
    refused(shoal(*again, "llama-3"), "--template = llama-3: the tokenizer has no <|begin_of_text|>, <|start_header")
    assert shoal(*again, "plain", "--field", "messages").code == 0


def test_data_refuses_what_it_cannot_read(shoal: Shoal, tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("In the beginning", encoding="utf-8")
    refused(shoal("data", text, tmp_path / "out"), "--tokenizer tokenizer.json or --train-vocab N, such as 2048")
    refused(shoal("data", text, tmp_path / "out", "--tokenizer", text), f"{text}: not a tokenizer.json")
    refused(shoal("data", tmp_path / "none", tmp_path / "out", "--train-vocab", 300), str(tmp_path / "none"))
    text.write_bytes(b"\xff")
    refused(shoal("data", text, tmp_path / "out", "--train-vocab", 300), str(text), "UTF-8")
    assert not (tmp_path / "out").exists()


def test_generate_says_the_same_for_one_seed(shoal: Shoal, trained: Path) -> None:
    def said(*arguments: object) -> str:
        result = shoal("generate", trained, "--prompt", "In the", "--tokens", 30, *arguments)
        assert (result.code, result.err) == (0, "")
        return result.out

    first = said("--seed", 3)
    assert first.startswith("In the")
    assert len(first) > 20
    assert said("--seed", 3) == first
    assert said("--seed", 4) != first
    told = json.loads(said("--seed", 3, "--json"))
    assert told["prompt"] + told["text"] == first.rstrip("\n")
    assert said("--temperature", 0, "--seed", 3) == said("--temperature", 0, "--seed", 4)
    assert shoal("generate", trained / "step-00000003", "--prompt", "In the", "--tokens", 30, "--seed", 3).out == first


def test_generate_refuses(shoal: Shoal, trained: Path, tmp_path: Path) -> None:
    refused(shoal("generate", trained, "--prompt", ""), "--prompt = '': no tokens in it", 'such as "In the"')
    refused(shoal("generate", tmp_path / "none", "--prompt", "a"), "none: no checkpoint is there")
    result = shoal("generate", trained)
    assert result.code == 2
    assert "--prompt" in result.err
    flip(trained / "step-00000003" / "rank-00000.safetensors")
    refused(shoal("generate", trained, "--prompt", "a"), "rank-00000.safetensors: damaged")
    (trained / "tokenizer.json").unlink()
    refused(shoal("generate", trained, "--prompt", "a"), "tokenizer.json: missing")


def test_inspect_shows_a_checkpoint_and_finds_a_flipped_bit(
    shoal: Shoal, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shoal("inspect", trained)
    for words in ("step-00000003", "exp_avg, exp_avg_sq", "F64", "embed.table.weight", "259 × 48", "use --verify"):
        assert words in shown.out
    told = json.loads(shoal("inspect", trained, "--verify", "--json").out)
    assert (told["kind"], told["step"], told["checksums"]) == ("checkpoint", 3, "all match")
    assert told["tensors"]["embed.table.weight"] == [259, 48]
    assert told["parameters"] == sum(_count(shape) for shape in told["tensors"].values())
    monkeypatch.chdir(trained / "step-00000002")
    assert json.loads(shoal("inspect", ".", "--json").out)["step"] == 2
    flip(trained / "step-00000003" / "rank-00001.safetensors")
    assert shoal("inspect", trained).code == 0
    refused(shoal("inspect", trained, "--verify"), "rank-00001.safetensors: damaged: its checksum is")


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


# all commands


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_an_example(shoal: Shoal, command: str | None) -> None:
    result = shoal(*filter(None, [command, "--help"]))
    assert (result.code, result.err) == (0, "")
    assert f"Example: shoal {command or 'train'} " in result.out
    if command:
        assert "--json" in result.out


@pytest.mark.parametrize(
    "arguments",
    [[], ["trian"], ["train"], ["train", "--bogus"], ["train", "a.toml", "-n", "0"], ["train", "a.toml", "-n", "two"]],
)
def test_wrong_use_exits_with_2(shoal: Shoal, arguments: list[str]) -> None:
    result = shoal(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err


def test_a_command_that_needs_no_torch_does_not_wait_for_it() -> None:
    code = "import sys; from shoal import cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_module_is_the_command_too() -> None:
    """What a launcher is given: ``-m shoal.cli``."""
    told = subprocess.run([sys.executable, "-m", "shoal.cli", "--help"], capture_output=True, text=True, check=True)
    assert "verify" in told.stdout
