"""A run of one process, the words of --dtype, and what a program says and returns when it fails."""

import random

import numpy
import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime import run as run_module
from alpaca_rlhf.runtime.run import choose_dtype, command, start_run

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_Z05_one_process_on_a_cpu_needs_no_launcher(capsys):
    run = start_run(seed=1)
    assert (run.rank, run.local_rank, run.world_size, run.is_main) == (0, 0, 1, True)
    assert (run.device, run.dtype) == (CPU, torch.float32)
    tensor = torch.tensor([1.5, -2.0], dtype=torch.float64)
    total = run.sum(tensor)
    torch.testing.assert_close(total, tensor)
    assert total is not tensor and total.data_ptr() != tensor.data_ptr()
    assert run.gather("x") == ["x"]
    assert run.all_true(True) and not run.all_true(False)
    run.barrier()
    run.print("loss", 1.5)
    assert capsys.readouterr().out == "loss 1.5\n"


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_P20_one_seed_gives_one_start_and_another_seed_another():
    draws = []
    for seed in (7, 7, 8):
        start_run(seed=seed)
        draws.append(drawn())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


def test_a_seed_beyond_numpys_range_is_accepted():
    start_run(seed=2**40 + 3)


def test_dtype_words_on_a_cpu():
    assert choose_dtype("auto", CPU) == (torch.float32, "")
    assert choose_dtype("fp32", CPU) == (torch.float32, "")
    dtype, notice = choose_dtype("bf16", CPU)
    assert dtype == torch.bfloat16 and "slow" in notice
    with pytest.raises(UserError, match="--dtype fp16 needs a GPU"):
        choose_dtype("fp16", CPU)
    with pytest.raises(UserError, match="--dtype half is unknown"):
        choose_dtype("half", CPU)


@pytest.mark.parametrize("native, expected", [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bf16_only_where_a_gpu_computes_in_it(monkeypatch, native, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    dtype, notice = choose_dtype("auto", GPU)
    assert dtype == expected
    assert bool(notice) is not native
    assert choose_dtype("fp16", GPU) == (torch.float16, "")


def test_ranks_without_a_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="WORLD_SIZE is 2 but MASTER_ADDR, MASTER_PORT, LOCAL_RANK is not set"):
        start_run(seed=1)


def test_more_processes_than_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="start at most 1 process"):
        start_run(seed=1)


def failing(error):
    def main(argv):
        raise error

    return command(main, memory_advice="use less")()


def test_a_users_mistake_is_one_line_and_code_2(capsys):
    assert failing(UserError("the path x does not exist")) == 2
    output = capsys.readouterr()
    assert output.err == "error: the path x does not exist\n" and output.out == ""


def test_other_ranks_say_who_they_are(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert failing(UserError("no")) == 2
    assert capsys.readouterr().err == "[rank 3] error: no\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_Z04_out_of_memory_names_the_options_of_the_step(capsys, error):
    assert failing(error) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory: use less (") and said.count("\n") == 1


def test_Z04_a_real_refusal_of_the_cpu_allocator_is_recognised(capsys):
    assert command(lambda argv: torch.empty(2**60))() == 1
    assert "out of memory" in capsys.readouterr().err


def test_an_interruption_is_one_line_and_code_130(capsys):
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("no"), SystemExit(4)])
def test_anything_else_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        failing(error)


def test_a_program_gets_its_words_and_gives_its_code():
    seen = []
    assert command(seen.append)(["--a", ""]) == 0
    assert seen == [["--a", ""]]
    assert command(lambda argv: 5)() == 5


def test_progress_in_a_log_is_whole_lines_and_few(capsys, monkeypatch):
    run = start_run(seed=1)
    bar = run.progress(200, "SFT")
    for step in range(200):
        bar.set_postfix({"loss": step})
        bar.update(1)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert "SFT" in lines[-1] and "200/200" in lines[-1] and "loss=199" in lines[-1]
    assert "\r" not in "".join(lines)


def test_progress_shows_nothing_on_other_ranks(capsys):
    run = run_module.Run(1, 1, 2, CPU, torch.float32)
    bar = run.progress(2, "SFT")
    bar.update(1)
    bar.set_postfix({"loss": 1.0})
    bar.close()
    run.print("not me")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "")


def test_write_once_writes_once(tmp_path):
    run = start_run(seed=1)
    target, calls = tmp_path / "cache", []

    def write():
        calls.append(1)
        target.write_text("x")

    run.write_once(target.exists, write)
    run.write_once(target.exists, write)
    assert calls == [1]


def test_write_once_raises_the_writers_own_error(tmp_path):
    def write():
        raise UserError("no such column")

    with pytest.raises(UserError, match="no such column"):
        start_run(seed=1).write_once(lambda: False, write)
    with pytest.raises(RuntimeError, match=r"not to be seen on rank \[0\]"):
        start_run(seed=1).write_once(lambda: False, lambda: None)
