"""What is said about the models of earlier steps before any weights are read."""

import json

import pytest

from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import note_other_shares
from tests.pipeline.steps import make_base, run_step


def made(folder, **data):
    folder.mkdir()
    given = {"paths": ["a.json", "b.json"], "sft_only_paths": [], "split": [2.0, 4.0, 4.0], "seed": 1234} | data
    (folder / "training_arguments.json").write_text(json.dumps({"step": "sft", "data": given}))
    return str(folder)


@pytest.mark.parametrize(
    "data, said",
    [
        ({}, None),
        ({"split": [0.2, 0.4, 0.4]}, None),
        ({"split": [1.0, 0.0, 0.0], "paths": ["other.json"]}, None),
        ({"split": [4.0, 4.0, 2.0]}, "a.json with --data_split 4,4,2 --data_seed 1234"),
        ({"seed": 7}, "a.json with --data_split 2,4,4 --data_seed 7"),
        ({"paths": ["other.json"], "sft_only_paths": ["./a.json"]}, "all of ./a.json"),
    ],
)
def test_D10_a_model_made_from_other_shares_of_the_same_data_is_told(tmp_path, data, said):
    told = []
    model = made(tmp_path / "model", **data)
    note_other_shares(("a.json", "c.json"), (2, 4, 4), 1234, told.append, model, str(tmp_path / "a hub name"))
    assert len(told) == (said is not None)
    assert all(said in sentence and model in sentence and "--data_split" in sentence for sentence in told)


@pytest.mark.parametrize("content", ["{}", '{"data": {"paths": ["a.json"]}}', '{"data": 3}'])
def test_a_file_of_another_program_says_nothing(tmp_path, content):
    (tmp_path / "training_arguments.json").write_text(content)
    note_other_shares(("a.json",), (2, 4, 4), 1234, pytest.fail, str(tmp_path))


def test_D10_steps_2_and_3_warn_of_another_split(tmp_path, capsys):
    make_base(tmp_path)
    flags = {"max_steps": 1, "model_name_or_path": tmp_path / "base", "output_dir": tmp_path / "actor"}
    assert run_step(1, tmp_path, **flags, data_split="2,4,4") == 0
    warnings = []
    for split in ("2,4,4", "1,5,4"):
        capsys.readouterr()
        flags = {"max_steps": 1, "model_name_or_path": tmp_path / "actor", "output_dir": tmp_path / "critic"}
        assert run_step(2, tmp_path, **flags, data_split=split) == 0
        flags = {"actor_model_name_or_path": tmp_path / "actor", "critic_model_name_or_path": tmp_path / "critic"}
        assert run_step(3, tmp_path, **flags, max_steps=1, data_split="2,4,4") == 0
        printed = capsys.readouterr().out
        warnings.append(printed.count("may be among those it has seen"))
    assert warnings == [0, 2]  # step 2 of step 1's output, step 3 of step 2's
