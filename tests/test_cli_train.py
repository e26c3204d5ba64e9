"""``fused-adamw train``: what it computes, leaves behind, goes on from and refuses."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from matplotlib import image
from rich.console import Console
from typer.testing import CliRunner, Result

import fused_adamw
from cases import assert_same_bits
from fused_adamw.cli import checkpoint, report, training
from fused_adamw.cli.app import app
from fused_adamw.cli.corpus import Corpus
from fused_adamw.cli.gpt import GPT
from fused_adamw.cli.session import run_to_end
from fused_adamw.cli.training import WARM_UP_STEPS, Settings, Training

SIZE = ["--width", "16", "--heads", "2", "--layers", "1", "--context", "16", "--batch-size", "4"]
SMALL = [*SIZE, "--no-compile", "--no-compare"]
# Large enough for Inductor to spread the backward pass of the embedding over threads.
COMPILED = ["--width", "32", "--heads", "2", "--layers", "1", "--context", "64", "--batch-size", "16"]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What other tests compiled of the same functions counts against the limit of recompilations."""
    torch._dynamo.reset()


def run(*arguments: object, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return result


def refusal(*arguments: object) -> str:
    return run(*arguments, expect=2).stderr.strip()


def loaded(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def figures(output: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((output / "figures.json").read_text(), parse_constant=refuse)


def settings(**changes: Any) -> Settings:
    """Those of ``SMALL``."""
    values = {"steps": 6, "batch_size": 4, "context": 16, "width": 16, "heads": 2, "layers": 1, "lr": 2e-3}
    values |= {"weight_decay": 0.1, "amsgrad": False, "max_grad_norm": None, "seed": 0, "device": "cpu"}
    values |= {"dtype": "float32"}
    return Settings(**{**values, "compile": False, "data": "", **changes})


def assert_same_run(found: Path, expected: Path) -> None:
    """The same parameters, moments and losses, to the bit."""
    a, b = loaded(found), loaded(expected)
    assert a["progress"]["step"] == b["progress"]["step"] == a["settings"]["steps"]
    assert a["progress"]["losses"] == b["progress"]["losses"]
    assert a["progress"]["held_out"] == b["progress"]["held_out"]
    assert a["model"].keys() == b["model"].keys()
    for name in a["model"]:
        assert_same_bits(a["model"][name], b["model"][name], name)
    states, expected_states = a["optimizer"]["state"], b["optimizer"]["state"]
    assert states.keys() == expected_states.keys() == set(range(len(a["model"])))
    moments = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if a["settings"]["amsgrad"] else set())
    moments |= set() if a["settings"]["dtype"] == "float32" else {"master_param"}
    assert a["scaler"] == b["scaler"]
    for i, state in states.items():
        assert state.keys() == moments
        for name in moments:
            assert_same_bits(state[name], expected_states[i][name], f"{name} of parameter {i}")


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    """Models this small only wait for more; what is compiled gets two."""
    set_threads(1)


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets Ctrl-C come in the step of that number, counted from 1 over all trainings of a command."""

    def interrupt(number: int) -> None:
        run_step, steps = Training.run_step, 0

        def run_step_and_count(self: Training) -> None:
            nonlocal steps
            steps += 1
            if steps == number:
                os.kill(os.getpid(), signal.SIGINT)
            run_step(self)

        monkeypatch.setattr(Training, "run_step", run_step_and_count)

    return interrupt


@pytest.mark.parametrize(
    "options",
    [
        [*SMALL],
        [*SMALL, "--amsgrad", "--max-grad-norm", "0.5"],
        [*COMPILED, "--no-compare"],
        [*COMPILED, "--no-compare", "--amsgrad", "--max-grad-norm", "0.5"],
        [*SMALL, "--dtype", "bfloat16", "--amsgrad"],
        [*SMALL, "--dtype", "float16"],
        [*SMALL, "--dtype", "float16", "--max-grad-norm", "0.5"],
        [*COMPILED, "--no-compare", "--dtype", "bfloat16", "--max-grad-norm", "0.5"],
        [*COMPILED, "--no-compare", "--dtype", "float16"],
    ],
    ids=[
        "eager",
        "eager AMSGrad",
        "compiled",
        "compiled AMSGrad",
        "eager bfloat16",
        "eager float16",
        "eager float16 clipped",
        "compiled bfloat16",
        "compiled float16",
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(
    tmp_path: Path,
    options: list[str],
    interrupt_at: Callable[[int], None],
    set_threads: Callable[[int], None],
) -> None:
    if "--no-compile" not in options:
        set_threads(2)
    options = [*options, "--steps", "6", "--output", str(tmp_path)]
    run(*options, "--checkpoint", tmp_path / "whole.pt")
    interrupt_at(3)
    interrupted = run(*options, "--checkpoint", tmp_path / "half.pt", expect=130)
    assert "has done 3 of 6 steps; go on with --resume" in interrupted.output
    assert loaded(tmp_path / "half.pt")["progress"]["step"] == 3
    run(*options, "--resume", tmp_path / "half.pt", "--checkpoint", tmp_path / "resumed.pt")
    assert_same_run(tmp_path / "resumed.pt", tmp_path / "whole.pt")


def test_a_compiled_step_has_the_same_bits_each_time(set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    corpus = Corpus.load([], context=64)
    gradients = []
    with training.deterministic():
        one = Training(settings(width=32, context=64, batch_size=16, compile=True), corpus, "torch")
        batch = corpus.training_batch(seed=0, step=0, batch_size=16, context=64)
        for _ in range(20):
            one.optimizer.zero_grad()
            one._loss(one.model, *batch).backward()
            gradients.append(one.model.tokens.weight.grad)
    assert not torch.are_deterministic_algorithms_enabled()
    for gradient in gradients[1:]:
        assert_same_bits(gradient, gradients[0])


# 16-bit activations are rounded elsewhere where operations are fused, the last of 8 bits near 1 say.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2), ("float16", 2e-2)], ids=str
)
def test_a_compiled_run_compiles_once_and_computes_what_an_eager_one_does(
    tmp_path: Path, set_threads: Callable[[int], None], dtype: str, tolerance: float
) -> None:
    set_threads(2)
    steps = WARM_UP_STEPS + 3
    options = [*COMPILED, "--steps", steps, "--max-grad-norm", 0.5, "--dtype", dtype, "--output", tmp_path]
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(*options, "--checkpoint", tmp_path / "compiled.pt")
    run(*options, "--no-compile", "--no-compare", "--checkpoint", tmp_path / "eager.pt")
    compiled, eager = (loaded(tmp_path / f"{name}.pt") for name in ("compiled", "eager"))
    torch.testing.assert_close(compiled["model"], eager["model"], rtol=tolerance, atol=tolerance)
    assert compiled["optimizer"]["state"][0]["step"] == steps


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fused_adamw", "train", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_interrupt_of_the_process_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    options = [*SMALL, "--steps", 600, "--output", tmp_path]
    part, whole = tmp_path / "part.pt", tmp_path / "whole.pt"
    process = start(*options, "--checkpoint", part, "--checkpoint-every", 5)
    deadline = time.monotonic() + 60
    while not part.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "\x1b" not in output  # no control codes, and no bar, where there is no terminal
    assert " left " not in output
    progress = loaded(part)["progress"]
    assert 5 <= progress["step"] == len(progress["losses"]) < 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.pt"]
    run(*options, "--resume", part, "--checkpoint", part)
    run(*options, "--checkpoint", whole)
    assert_same_run(part, whole)


@pytest.mark.parametrize("step", [0, 2])
def test_an_interrupt_that_ends_the_compiler_too_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    options = [*SMALL, "--steps", "6", "--output", str(tmp_path)]
    real_loss = training._loss
    steps = itertools.count()

    def loss(*arguments: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and next(steps) == step:
            os.kill(os.getpid(), signal.SIGINT)
            raise torch._dynamo.exc.TorchDynamoException("the compiler was ended")
        return real_loss(*arguments)

    monkeypatch.setattr(training, "_loss", loss)
    interrupted = run(*options, expect=130)
    assert f"has done {step} of 6 steps" in interrupted.output
    monkeypatch.undo()
    run(*options, "--resume", tmp_path / "checkpoint.pt", "--checkpoint", tmp_path / "resumed.pt")
    run(*options, "--checkpoint", tmp_path / "whole.pt")
    assert_same_run(tmp_path / "resumed.pt", tmp_path / "whole.pt")


def test_an_interrupt_before_the_first_step_leaves_a_checkpoint_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*SMALL, "--steps", "3", "--output", str(tmp_path)]
    held_out_batch = Corpus.held_out_batch

    def interrupted_batch(*arguments: Any) -> Any:  # where the training is set up
        os.kill(os.getpid(), signal.SIGINT)
        return held_out_batch(*arguments)

    monkeypatch.setattr(Corpus, "held_out_batch", interrupted_batch)
    assert "has done 0 of 3 steps" in run(*options, expect=130).output
    monkeypatch.undo()
    run(*options, "--resume", tmp_path / "checkpoint.pt", "--checkpoint", tmp_path / "resumed.pt")
    run(*options, "--checkpoint", tmp_path / "whole.pt")
    assert_same_run(tmp_path / "resumed.pt", tmp_path / "whole.pt")


def test_an_interrupt_of_the_comparison_keeps_what_was_trained(
    tmp_path: Path, interrupt_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*SIZE, "--no-compile", "--steps", "4", "--output", str(tmp_path)]
    interrupt_at(6)  # the second of torch's
    run(*options, expect=130)
    assert loaded(tmp_path / "checkpoint.pt")["progress"]["step"] == 4
    monkeypatch.undo()
    run(*options, "--resume", tmp_path / "checkpoint.pt")
    found = figures(tmp_path)
    run(*options)
    whole = figures(tmp_path)
    assert found["largest_parameter_difference"] == whole["largest_parameter_difference"]
    for name in (report.OURS, report.TORCHS):
        assert found["optimizers"][name]["losses"] == whole["optimizers"][name]["losses"]


def test_the_checkpoint_is_there_before_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"
    set_up = Training.__init__

    def set_up_ours(self: Training, settings: Settings, corpus: Corpus, optimizer: Any) -> None:
        if optimizer == "torch":
            raise KeyboardInterrupt  # as a second Ctrl-C does
        set_up(self, settings, corpus, optimizer)

    monkeypatch.setattr(Training, "__init__", set_up_ours)
    options = [*SIZE, "--no-compile", "--steps", "2", "--output", str(tmp_path), "--checkpoint", str(path)]
    assert CliRunner().invoke(app, ["train", *options]).exit_code != 0
    assert loaded(path)["progress"]["step"] == 2


def test_the_figures_are_those_of_a_training_written_out(tmp_path: Path) -> None:
    steps = 12
    saved = tmp_path / "ours.pt"
    result = run(*SIZE, "--no-compile", "--steps", steps, "--output", tmp_path, "--checkpoint", saved)
    found = figures(tmp_path)
    ours, torchs = found["optimizers"][report.OURS], found["optimizers"][report.TORCHS]

    corpus = Corpus.load([], context=16)
    model = GPT(context=16, width=16, heads=2, layers=1, seed=0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, fused=True)
    losses, held_out = [], []
    for step in range(steps + 1):
        with torch.no_grad():
            held_out.append([step, model(*corpus.held_out_batch(32, 16)).item()])
        if step == steps:
            break
        optimizer.param_groups[0]["lr"] = settings(steps=steps).learning_rate(step)
        optimizer.zero_grad()
        loss = model(*corpus.training_batch(0, step, 4, 16))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    our_model = loaded(saved)["model"]
    difference = max((our_model[name] - param).abs().max() for name, param in model.named_parameters())

    assert torchs["losses"] == losses
    assert torchs["held_out"] == held_out
    assert torchs["held_out_loss"] == held_out[-1][1]
    assert torchs["held_out_loss_before"] == held_out[0][1]
    assert torchs["training_loss"] == losses[-1]
    assert found["largest_parameter_difference"] == difference
    assert 0.0 < difference < 1e-4
    model.load_state_dict(our_model)
    with torch.no_grad():
        assert ours["held_out_loss"] == model(*corpus.held_out_batch(32, 16)).item()
    assert ours["losses"] == loaded(saved)["progress"]["losses"]
    assert ours["losses"] == pytest.approx(losses, rel=1e-4)
    assert found["parameters"] == sum(param.numel() for param in parameters)
    assert found["settings"]["steps"] == steps
    assert "largest_master_weight_difference" not in found  # float32 parameters have none
    assert found["versions"] == {
        "fused_adamw": fused_adamw.__version__,
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    for run_figures in (ours, torchs):
        assert run_figures["optimizer_timed_steps"] == steps - 2
        assert 0.0 < run_figures["optimizer_seconds"] < 60.0
    assert f"{difference:.3g}" in result.output
    assert f"{ours['held_out_loss']:.6f}" in result.output
    height, width, _ = image.imread(tmp_path / "loss.png").shape
    assert (height, width) == (600, 1080)


@pytest.mark.parametrize("clip", [None, 0.1], ids=["plain", "clipped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_figures_of_16_bit_parameters_are_those_of_a_training_written_out(
    tmp_path: Path, dtype: torch.dtype, clip: float | None
) -> None:
    """torch's, on float32 copies of the parameters."""
    steps = 12
    saved = tmp_path / "ours.pt"
    options = [] if clip is None else ["--max-grad-norm", clip]
    options += ["--dtype", str(dtype).removeprefix("torch."), "--checkpoint", saved]
    result = run(*SIZE, "--no-compile", "--steps", steps, "--output", tmp_path, *options)
    found = figures(tmp_path)
    ours, torchs = found["optimizers"][report.OURS], found["optimizers"][report.TORCHS]

    corpus = Corpus.load([], context=16)
    model = GPT(context=16, width=16, heads=2, layers=1, seed=0).to(dtype)
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(param.detach().float()) for param in parameters]
    optimizer = torch.optim.AdamW(masters, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = settings(steps=steps).learning_rate(step)
        model.zero_grad()
        loss = model(*corpus.training_batch(0, step, 4, 16))
        scaler.scale(loss).backward()
        for master, param in zip(masters, parameters, strict=True):
            assert param.grad.dtype == dtype
            master.grad = param.grad.float()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(masters, clip)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, param in zip(masters, parameters, strict=True):
                param.copy_(master)
        losses.append(loss.item())
    with torch.no_grad():
        held_out = model(*corpus.held_out_batch(32, 16)).item()
    state = loaded(saved)
    our_masters = [own["master_param"] for own in state["optimizer"]["state"].values()]
    difference = max(
        (mine - other).abs().max().item() for mine, other in zip(our_masters, masters, strict=True)
    )

    assert torchs["losses"] == losses
    assert torchs["held_out_loss"] == held_out
    assert ours["losses"] == state["progress"]["losses"]
    assert ours["losses"] == pytest.approx(losses, rel=1e-2)
    assert found["largest_master_weight_difference"] == difference
    # A gradient near 0 has few bits that agree, and Adam makes a step of full size of it.
    assert 0.0 < difference < 0.1 * sum(settings(steps=steps).learning_rate(step) for step in range(steps))
    assert ours["skipped_steps"] == torchs["skipped_steps"] == 0
    assert {tensor.dtype for tensor in state["model"].values()} == {dtype}
    assert f"{difference:.3g}" in result.output
    assert str(dtype).removeprefix("torch.") in result.output


def test_steps_that_loss_scaling_skips_are_counted() -> None:
    for optimizer, scaler in (("fused_adamw", fused_adamw.GradScaler), ("torch", torch.amp.GradScaler)):
        one = Training(settings(dtype="float16"), Corpus.load([], 16), optimizer)
        one._scaler = scaler("cpu", init_scale=2.0**40, growth_interval=1000)
        before = [param.detach().clone() for param in one.model.parameters()]
        for _ in range(3):
            one.run_step()
        assert one.skipped_steps == 3
        assert one._scaler.get_scale() == 2.0**37
        for param, old in zip(one.model.parameters(), before, strict=True):
            assert_same_bits(param.detach(), old)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_held_out_loss_falls(tmp_path: Path, dtype: str) -> None:
    run(*SMALL, "--steps", 60, "--dtype", dtype, "--output", tmp_path)
    ours = figures(tmp_path)["optimizers"][report.OURS]
    assert ours["held_out_loss"] < ours["held_out_loss_before"] - 1.0


def test_the_model_does_not_see_later_bytes() -> None:
    model = GPT(context=16, width=16, heads=2, layers=2, seed=0)
    inputs, targets = Corpus.load([], context=16).training_batch(seed=0, step=0, batch_size=4, context=16)
    targets[:, -1] = -100  # left out of the cross-entropy
    changed = inputs.clone()
    changed[:, -1] += 1
    torch.testing.assert_close(model(changed, targets), model(inputs, targets), rtol=1e-6, atol=0.0)


def test_the_default_model_has_one_to_three_million_parameters() -> None:
    model = GPT(context=64, width=208, heads=4, layers=2, seed=0)  # the defaults of the options
    assert 1_000_000 <= sum(param.numel() for param in model.parameters()) <= 3_000_000
    help_text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    for option, value in {"--context": 64, "--width": 208, "--heads": 4, "--layers": 2}.items():
        line = next(line for line in help_text.splitlines() if f"{option} " in line)
        assert f"[default: {value}]" in line


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [settings(steps=100, lr=1.0).learning_rate(step) for step in range(101)]
    assert rates[:WARM_UP_STEPS] == pytest.approx([(i + 1) / WARM_UP_STEPS for i in range(WARM_UP_STEPS)])
    assert rates[WARM_UP_STEPS] == pytest.approx(1.0)
    assert all(a > b for a, b in zip(rates[WARM_UP_STEPS:], rates[WARM_UP_STEPS + 1 :], strict=False))
    assert rates[100] == pytest.approx(0.1)


def test_a_training_that_diverges_still_leaves_figures(tmp_path: Path) -> None:
    run(*SIZE, "--no-compile", "--steps", 12, "--lr", "1e30", "--output", tmp_path)
    found = figures(tmp_path)
    assert found["optimizers"][report.OURS]["training_loss"] is None
    assert found["largest_parameter_difference"] is None


def test_clipping_inside_the_step_agrees_with_torchs(tmp_path: Path) -> None:
    run(*SIZE, "--no-compile", "--steps", 20, "--max-grad-norm", 0.1, "--output", tmp_path)
    clipped = figures(tmp_path)
    run(*SMALL, "--steps", 20, "--output", tmp_path)
    free = figures(tmp_path)
    assert clipped["largest_parameter_difference"] < 1e-3
    assert clipped["optimizers"][report.OURS]["losses"] != free["optimizers"][report.OURS]["losses"]


def test_users_files_are_read_in_order(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.txt" for name in "abc")
    for path, byte in ((first, b"x"), (second, b"y"), (third, b"z")):
        path.write_bytes(byte * 500)
    corpus = Corpus.load([second, first, third], context=16)
    assert bytes(torch.cat([corpus.training, corpus.held_out]).tolist()) == b"\n".join(
        [b"y" * 500, b"x" * 500, b"z" * 500]
    )
    options = [*SMALL, "--steps", 1, "--output", tmp_path]
    for data in (
        ["--data", second, "--data", first, "--data", third],
        ["--data", second, first, third],
        [f"--data={second}", first, "--data", third],
    ):
        run(*data, *options)
        assert figures(tmp_path)["settings"]["data"] == corpus.digest
    assert "unexpected extra argument" in refusal(*options, first)


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus = Corpus.load([], context=16)
    inputs, targets = corpus.training_batch(3, 7, batch_size=4, context=16)
    torch.manual_seed(1)
    again, _ = corpus.training_batch(3, 7, batch_size=4, context=16)
    assert torch.equal(inputs, again)
    for seed, step in ((3, 8), (4, 7)):
        assert not torch.equal(inputs, corpus.training_batch(seed, step, batch_size=4, context=16)[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_held_out_windows_reach_from_end_to_end() -> None:
    corpus = Corpus.load([], context=16)
    inputs, targets = corpus.held_out_batch(3, 16)
    assert torch.equal(inputs[0], corpus.held_out[:16].long())
    assert torch.equal(targets[-1], corpus.held_out[-16:].long())
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("context", [2, 16])
def test_the_least_text_that_is_enough_is_read_to_its_end(tmp_path: Path, context: int) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(10 * (context + 1))))
    corpus = Corpus.load([text], context)
    inputs, targets = corpus.held_out_batch(3, context)
    for window, after in zip(inputs, targets[:, -1:], strict=True):
        assert torch.equal(torch.cat([window, after]), corpus.held_out.long())
    starts = {corpus.training_batch(0, i, 8, context)[0][j, 0].item() for i in range(200) for j in range(8)}
    assert starts == set(range(len(corpus.training) - context))


def test_a_terminal_sees_loss_rate_and_time_left() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80, markup=False)
    one = Training(settings(), Corpus.load([], 16), "fused_adamw")
    run_to_end(one, "fused_adamw.AdamW", console, [])
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue().split("\r")[-1])
    assert "6/6" in last
    assert f"loss {one.progress.losses[-1]:.3f}" in last
    assert "tokens/s" in last
    assert "left 0:00:00" in last


def test_a_failed_write_keeps_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"
    one = Training(settings(), Corpus.load([], 16), "fused_adamw")
    checkpoint.save(one, path)
    before = path.read_bytes()

    def fill_the_disk(contents: object, to: Path) -> None:
        to.write_bytes(before[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", fill_the_disk)
    assert_expected_inline(
        refusal(*SMALL, "--steps", 1, "--output", tmp_path, "--checkpoint", path).replace(
            str(tmp_path), "DIR"
        ),
        """fused-adamw train: cannot write DIR/checkpoint.pt: No space left on device""",
    )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(*SMALL, "--steps", 2, "--checkpoint", "whole.pt")
    contents = loaded(Path("whole.pt"))

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, ("made-by-a-checkpoint",)

    whole = Path("whole.pt").read_bytes()

    broken: dict[str, Callable[[Path], object]] = {
        "empty.pt": lambda path: path.write_bytes(b""),
        "text.pt": lambda path: path.write_bytes(b"not a checkpoint"),
        "cut.pt": lambda path: path.write_bytes(whole[: len(whole) // 2]),
        "tensor.pt": lambda path: torch.save(torch.zeros(3), path),
        "list.pt": lambda path: torch.save([1, 2], path),
        "weights.pt": lambda path: torch.save(contents["model"], path),
        "no-model.pt": lambda path: torch.save({**contents, "model": {}}, path),
        "no-optimizer.pt": lambda path: torch.save({**contents, "optimizer": {}}, path),
        "no-progress.pt": lambda path: torch.save({**contents, "progress": {"steps": 3}}, path),
        "code.pt": lambda path: torch.save({**contents, "model": Code()}, path),
    }
    for name, write in broken.items():
        write(Path(name))
        assert (
            refusal(*SMALL, "--steps", 2, "--resume", name)
            == f"fused-adamw train: {name} is no checkpoint of this command"
        )
    assert not Path("made-by-a-checkpoint").exists()


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(*SMALL, "--steps", 2, "--checkpoint", "two.pt")
    Path("other.txt").write_text("other " * 100)
    assert_expected_inline(
        "\n".join(
            refusal(*SMALL, "--steps", 2, *change, "--resume", "two.pt")
            for change in (
                ["--steps", 3],
                ["--batch-size", 5],
                ["--lr", 0.5],
                ["--amsgrad"],
                ["--compile"],
                ["--max-grad-norm", 1],
                ["--seed", 1],
                ["--dtype", "bf16"],
                ["--data", "other.txt"],
            )
        ),
        """\
fused-adamw train: two.pt was made with --steps 2, and this run has --steps 3; the same is required
fused-adamw train: two.pt was made with --batch-size 4, and this run has --batch-size 5; the same is required
fused-adamw train: two.pt was made with --lr 0.002, and this run has --lr 0.5; the same is required
fused-adamw train: two.pt was made with --no-amsgrad, and this run has --amsgrad; the same is required
fused-adamw train: two.pt was made with --no-compile, and this run has --compile; the same is required
fused-adamw train: two.pt was made with no --max-grad-norm, and this run has --max-grad-norm 1.0; the same is required
fused-adamw train: two.pt was made with --seed 0, and this run has --seed 1; the same is required
fused-adamw train: two.pt was made with --dtype float32, and this run has --dtype bfloat16; the same is required
fused-adamw train: two.pt was made on another text; the same --data is required""",  # noqa: E501
    )


def test_another_environment_is_told_of(tmp_path: Path, set_threads: Callable[[int], None]) -> None:
    options = [*SMALL, "--steps", 2, "--output", tmp_path]
    set_threads(2)
    run(*options, "--checkpoint", tmp_path / "two.pt")
    assert "note" not in run(*options, "--resume", tmp_path / "two.pt").output
    set_threads(1)
    resumed = run(*options, "--resume", tmp_path / "two.pt").output
    assert "was made with threads 2 (here 1): the last bits may differ\n" in resumed


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("short")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_expected_inline(
        "\n".join(
            refusal(*arguments)
            for arguments in (
                [*SMALL, "--data", "missing.txt"],
                [*SMALL, "--data", "."],
                [*SMALL, "--data", "empty.txt"],
                [*SMALL, "--data", "short.txt"],
                [*SMALL, "--heads", 3],
                [*SMALL, "--lr", "inf"],
                [*SMALL, "--max-grad-norm", "inf"],
                [*SMALL, "--device", "abacus"],
                [*SMALL, "--device", "meta"],
                [*SMALL, "--resume", "missing.pt"],
                [*SMALL, "--checkpoint", "."],
                [*SMALL, "--output", "short.txt"],
                ["--steps", 1],
            )
        ),
        """\
fused-adamw train: cannot read missing.txt: No such file or directory
fused-adamw train: cannot read .: Is a directory
fused-adamw train: the text has 0 bytes; windows of 16 bytes need 170 at least
fused-adamw train: the text has 5 bytes; windows of 16 bytes need 170 at least
fused-adamw train: --width is 16; a multiple of --heads, 3, is required
fused-adamw train: --lr is inf; a finite number is required
fused-adamw train: --max-grad-norm is inf; a finite number is required
fused-adamw train: --device is abacus; cpu, cuda or cuda:N is required
fused-adamw train: --device is meta; cpu, cuda or cuda:N is required
fused-adamw train: cannot read missing.pt: No such file or directory
fused-adamw train: cannot write .: it is a folder
fused-adamw train: cannot write to short.txt: File exists
fused-adamw train: torch.compile needs a C++ compiler and found no no-such-compiler; install one, name one in CXX, or give --no-compile""",  # noqa: E501
    )
    if not torch.cuda.is_available():
        assert_expected_inline(
            refusal(*SMALL, "--device", "cuda"),
            """fused-adamw train: --device is cuda, and this torch sees no CUDA device""",
        )
    assert "Invalid value for '--steps'" in refusal(*SMALL, "--steps", 0)
    assert "Invalid value for '--dtype': 'float64' is not one of" in refusal(*SMALL, "--dtype", "float64")


def test_a_compiler_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch._inductor.exc.InvalidCxxCompiler

    loss = torch.compile(lambda model, inputs, targets: model(inputs, targets), backend=fail)
    monkeypatch.setattr(training, "_compiled_loss", lambda: loss)
    message = refusal(*SIZE, "--steps", 1, "--output", tmp_path)
    assert message.startswith("fused-adamw train: the step cannot be compiled: ")
    assert message.endswith("; --no-compile trains without")
    assert "No working C++ compiler found" in message
    assert "\n" not in message


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"fused_adamw {fused_adamw.__version__}\n"


def test_a_missing_extra_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
