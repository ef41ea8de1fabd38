"""A user's mistake: one sentence, exit code 2, and no model has been loaded."""

import os

import pytest

from alpaca_rlhf.deepspeed_chat.training.utils.model import model_utils, reward_model
from tests.pipeline.steps import make_base, run_step
from tests.tiny import save_model, tiny_gpt2, write_jsonl


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("base"))
    assert run_step(1, folder, model_name_or_path=folder / "base", output_dir=folder / "actor", max_steps=1) == 0
    return folder


@pytest.fixture(autouse=True)
def no_model_loads(request, monkeypatch):
    """Loading weights is a failure of the test, once the fixtures have made theirs."""
    request.getfixturevalue("base")

    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded before the mistake was found")

    monkeypatch.setattr(model_utils, "load_complete", loaded)
    monkeypatch.setattr(reward_model, "load_complete", loaded)


def one_sentence(capsys, *parts: object) -> None:
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, lines
    for part in parts:
        assert str(part) in errors[0], errors[0]


def test_D08_a_data_path_that_does_not_exist(base, capsys):
    assert run_step(1, base, model_name_or_path=base / "base", data_path="./misspelt.jsonl") == 2
    one_sentence(capsys, "misspelt.jsonl")


def test_a_model_path_that_does_not_exist(base, capsys):
    assert run_step(1, base, model_name_or_path=base / "nothing") == 2
    one_sentence(capsys, base / "nothing")


def test_a_file_with_none_of_the_known_columns(base, tmp_path, capsys):
    data = write_jsonl(tmp_path / "odd.jsonl", [{"alpha": "a", "beta": "b"}])
    assert run_step(2, base, model_name_or_path=base / "base", data_path=data) == 2
    one_sentence(capsys, "odd.jsonl", "alpha, beta", "chosen")


def test_D11_single_answers_for_the_reward_model(base, tmp_path, capsys):
    data = write_jsonl(tmp_path / "single.jsonl", [{"instruction": "name", "input": "", "output": "blue"}] * 4)
    assert run_step(2, base, model_name_or_path=base / "base", data_path=data) == 2
    one_sentence(capsys, "single.jsonl", "rejected")


@pytest.mark.parametrize("step", [1, 2])
def test_L01_lora_names_that_match_nothing(base, capsys, step):
    flags = {"lora_dim": 4, "lora_module_name": "nothing", "model_name_or_path": base / "base"}
    assert run_step(step, base, **flags) == 2
    one_sentence(capsys, "nothing", "q_proj", "down_proj")


def test_R06_step_1s_output_as_the_reward_model(base, capsys):
    flags = {"actor_model_name_or_path": base / "actor", "critic_model_name_or_path": base / "actor"}
    assert run_step(3, base, **flags) == 2
    one_sentence(capsys, base / "actor", "step 2 makes a reward model")


def test_P21_prompt_and_answer_longer_than_the_models_positions(base, tmp_path, capsys):
    save_model(tmp_path / "short", tiny_gpt2(57, positions=32))
    flags = {"actor_model_name_or_path": tmp_path / "short", "critic_model_name_or_path": base / "actor"}
    assert run_step(3, base, **flags, max_prompt_seq_len=24, max_answer_seq_len=16) == 2
    one_sentence(capsys, "32 positions", "24 prompt + 16 answer", "40")
    assert run_step(1, base, model_name_or_path=tmp_path / "short", max_seq_len=33) == 2
    one_sentence(capsys, "32 positions", "33")


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/proc"), reason="root may write everywhere")
def test_an_output_directory_that_cannot_be_written(base, capsys):
    place = "/proc/output" if os.geteuid() == 0 else "/output"
    assert run_step(1, base, model_name_or_path=base / "base", output_dir=place) == 2
    one_sentence(capsys, place)


def test_an_output_directory_that_is_a_file(base, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert run_step(1, base, model_name_or_path=base / "base", output_dir=tmp_path / "file") == 2
    one_sentence(capsys, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_misspelt_flag(base, capsys):
    assert run_step(1, base, model_name_or_path=base / "base", lora_dims=4) == 2
    one_sentence(capsys, "--lora_dims", "--lora_dim")


def test_D03_nothing_left_under_the_limit(base, capsys):
    flags = {"actor_model_name_or_path": base / "actor", "critic_model_name_or_path": base / "actor"}
    assert run_step(1, base, model_name_or_path=base / "base", max_seq_len=2) == 2
    one_sentence(capsys)
    assert run_step(3, base, **flags) == 2


@pytest.mark.parametrize("flag", ["enable_hybrid_engine", "unpin_actor_parameters"])
def test_the_hybrid_engine_is_refused(base, capsys, flag):
    flags = {"actor_model_name_or_path": base / "actor", "critic_model_name_or_path": base / "actor", flag: True}
    assert run_step(3, base, **flags) == 2
    one_sentence(capsys, f"--{flag}")
