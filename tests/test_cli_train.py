"""``fused-adamw train``: what it computes, leaves behind, goes on from and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from typer.testing import CliRunner, Result

import fused_adamw
from fused_adamw.cli import checkpoint, report
from fused_adamw.cli.app import app
from fused_adamw.cli.corpus import Corpus
from fused_adamw.cli.gpt import GPT
from fused_adamw.cli.training import Training

SIZE = ["--width", "16", "--heads", "2", "--layers", "1", "--context", "16", "--batch-size", "4"]
SMALL = [*SIZE, "--no-compile", "--no-compare"]


def run(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exit_code == expect, result.output
    return result


def loaded(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def assert_same_bits(a: object, b: object) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bits(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, amsgrad: bool, monkeypatch) -> None:
    options = [*SMALL, "--steps", 6, "--output", tmp_path, *(["--amsgrad"] if amsgrad else [])]
    run(*options, "--checkpoint", tmp_path / "whole.pt")

    real_save = checkpoint.save
    interrupts = iter([signal.SIGINT])

    def save_and_interrupt(training: Training, path: Path) -> None:
        real_save(training, path)
        for number in interrupts:  # once
            os.kill(os.getpid(), number)

    monkeypatch.setattr(checkpoint, "save", save_and_interrupt)
    interrupted = run(*options, "--checkpoint", tmp_path / "half.pt", "--checkpoint-every", 3, expect=130)
    assert "has done 3 of 6 steps; go on with --resume" in interrupted.output
    assert loaded(tmp_path / "half.pt")["progress"]["step"] == 3
    monkeypatch.undo()
    run(*options, "--resume", tmp_path / "half.pt", "--checkpoint", tmp_path / "resumed.pt")

    whole, resumed = loaded(tmp_path / "whole.pt"), loaded(tmp_path / "resumed.pt")
    assert resumed["progress"]["step"] == 6
    for contents in (whole, resumed):
        del contents["progress"]["optimizer_seconds"]
    assert_same_bits(whole, resumed)


def test_an_interrupt_of_the_process_leaves_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fused_adamw", "train", *SMALL, "--steps", "100000"]
    process = subprocess.Popen(
        [
            *command,
            "--output",
            str(tmp_path),
            "--checkpoint",
            str(tmp_path / "c.pt"),
            "--checkpoint-every",
            "5",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "c.pt").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "\x1b" not in output  # no control codes where there is no terminal
    contents = loaded(tmp_path / "c.pt")
    assert contents["progress"]["step"] == len(contents["progress"]["losses"]) > 0


def test_the_held_out_loss_falls_and_the_files_hold_it(tmp_path: Path) -> None:
    result = run(*SIZE, "--no-compile", "--steps", 60, "--output", tmp_path)
    found = json.loads((tmp_path / "figures.json").read_text())
    ours, theirs = found["optimizers"][report.OURS], found["optimizers"][report.TORCHS]
    assert ours["held_out_loss"] < ours["held_out_loss_before"] - 1.0
    assert len(ours["losses"]) == len(theirs["losses"]) == 60
    assert ours["held_out"][-1] == [60, ours["held_out_loss"]]
    # The same seed and batches: the first loss is the same number, the others as good as.
    assert ours["losses"][0] == theirs["losses"][0]
    torch.testing.assert_close(
        torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=1e-3, atol=1e-3
    )
    assert 0.0 < found["largest_parameter_difference"] < 1e-2
    assert found["parameters"] == sum(p.numel() for p in GPT(16, 16, 2, 1, seed=0).parameters())
    assert found["versions"]["torch"] == torch.__version__
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out loss after" in result.output


def test_clipping_inside_the_step_agrees_with_torchs(tmp_path: Path) -> None:
    run(*SIZE, "--no-compile", "--steps", 20, "--max-grad-norm", 0.1, "--output", tmp_path)
    clipped = json.loads((tmp_path / "figures.json").read_text())
    run(*SMALL, "--steps", 20, "--output", tmp_path)
    free = json.loads((tmp_path / "figures.json").read_text())
    assert clipped["largest_parameter_difference"] < 1e-3
    assert clipped["optimizers"][report.OURS]["losses"] != free["optimizers"][report.OURS]["losses"]


def test_the_compiled_step_computes_what_the_eager_one_does(tmp_path: Path) -> None:
    run(*SIZE, "--no-compare", "--steps", 4, "--output", tmp_path, "--checkpoint", tmp_path / "compiled.pt")
    run(*SMALL, "--steps", 4, "--output", tmp_path, "--checkpoint", tmp_path / "eager.pt")
    compiled, eager = (loaded(tmp_path / f"{name}.pt") for name in ("compiled", "eager"))
    torch.testing.assert_close(compiled["model"], eager["model"], rtol=1e-3, atol=1e-3)
    assert compiled["optimizer"]["state"][0]["step"] == 4


def test_users_files_are_read_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_bytes(b"x" * 500)
    second.write_bytes(b"y" * 500)
    corpus = Corpus.load([first, second], context=16)
    assert bytes(torch.cat([corpus.training, corpus.held_out]).tolist()) == b"x" * 500 + b"\n" + b"y" * 500
    run(*SMALL, "--steps", 1, "--data", first, "--data", second, "--output", tmp_path)


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus = Corpus.load([], context=16)
    inputs, targets = corpus.training_batch(3, 7, batch_size=4, context=16)
    again, _ = corpus.training_batch(3, 7, batch_size=4, context=16)
    other, _ = corpus.training_batch(3, 8, batch_size=4, context=16)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def refusal(*arguments: object) -> str:
    return run(*arguments, expect=2).stderr.strip()


def test_refusals(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_expected_inline(
        refusal(*SMALL, "--data", "missing.txt"),
        """fused-adamw train: cannot read missing.txt: No such file or directory""",
    )
    Path("empty.txt").touch()
    assert_expected_inline(
        refusal(*SMALL, "--data", "empty.txt"),
        """fused-adamw train: the text has 0 bytes; windows of 16 bytes need 170 at least""",
    )
    Path("short.txt").write_text("short")
    assert_expected_inline(
        refusal(*SMALL, "--data", "short.txt"),
        """fused-adamw train: the text has 5 bytes; windows of 16 bytes need 170 at least""",
    )
    assert_expected_inline(
        refusal(*SMALL, "--heads", 3),
        """fused-adamw train: --width is 16; a multiple of --heads, 3, is required""",
    )
    assert_expected_inline(
        refusal(*SMALL, "--device", "abacus"),
        """fused-adamw train: --device is abacus; cpu, cuda or cuda:N is required""",
    )
    Path("broken.pt").write_bytes(b"not a checkpoint")
    assert_expected_inline(
        refusal(*SMALL, "--resume", "broken.pt"),
        """fused-adamw train: broken.pt is no checkpoint of this command""",
    )
    assert_expected_inline(
        refusal(*SMALL, "--resume", "missing.pt"),
        """fused-adamw train: cannot read missing.pt: No such file or directory""",
    )
    run(*SMALL, "--steps", 2, "--checkpoint", "two.pt")
    assert_expected_inline(
        refusal(*SMALL, "--steps", 3, "--resume", "two.pt"),
        """fused-adamw train: two.pt was made with --steps 2, and this run has --steps 3; the same is required""",  # noqa: E501
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_expected_inline(
        refusal("--steps", 1),
        """fused-adamw train: torch.compile needs a C++ compiler and found no no-such-compiler; install one, name one in CXX, or give --no-compile""",  # noqa: E501
    )
    if not torch.cuda.is_available():
        assert_expected_inline(
            refusal(*SMALL, "--device", "cuda"),
            """fused-adamw train: --device is cuda, and this torch sees no CUDA device""",
        )
    assert "Invalid value for '--steps'" in refusal(*SMALL, "--steps", 0)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"fused_adamw {fused_adamw.__version__}\n"


def test_a_missing_extra_is_one_sentence(monkeypatch, capsys) -> None:
    from fused_adamw import cli

    monkeypatch.setattr(cli, "_NEEDED", ("typer", "no_such_module"))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert_expected_inline(
        capsys.readouterr().err,
        """\
fused-adamw needs the 'cli' extra: pip install 'fused_adamw[cli]'
""",
    )
