"""What must not change a result: how a step is cut, the padding token, spare rows of the embeddings, a path."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.pipeline.steps import make_base, metrics, run_step, three_steps, trained
from tests.tiny import save_model, tiny_llama, word_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("step,kind", [(1, AutoModelForCausalLM), (2, AutoModelForSequenceClassification)])
def test_S04_a_step_may_be_cut_in_any_way(base, tmp_path, step, kind):
    results = []
    for micro, accumulation in ((8, 1), (2, 4), (1, 8)):
        out = tmp_path / f"{micro}x{accumulation}"
        flags = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation, "output_dir": out}
        assert run_step(step, base, model_name_or_path=base / "base", num_train_epochs=1, **flags) == 0
        losses = [record["loss"] for record in metrics(out) if "loss" in record]
        results.append((losses, kind.from_pretrained(out).state_dict()))
    (losses, weights), *others = results
    for other_losses, other_weights in others:
        assert other_losses == pytest.approx(losses, rel=1e-5)
        for name in weights:  # three Adam steps at 1e-2 make more of the rounding of a sum
            torch.testing.assert_close(other_weights[name], weights[name], atol=2e-5, rtol=1e-5)


def test_S04_per_token_means_would_differ(base, tmp_path):
    """The twin: answers of unequal length, so averaging micro-batches first is another loss."""
    losses = []
    for micro, accumulation in ((8, 1), (1, 8)):
        out = tmp_path / str(micro)
        flags = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation, "output_dir": out}
        assert run_step(1, base, model_name_or_path=base / "base", max_steps=1, learning_rate=0, **flags) == 0
        losses.append([record["tokens"] for record in metrics(out) if "tokens" in record])
    assert losses[0] == losses[1] and losses[0][0] % 8 != 0


def test_T02_a_tokenizer_whose_pad_is_its_eos(tmp_path):
    make_base(tmp_path, tokenizer=word_tokenizer(pad_is_eos=True))
    assert run_step(1, tmp_path, model_name_or_path=tmp_path / "base", output_dir=tmp_path / "actor") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert run_step(2, tmp_path, model_name_or_path=tmp_path / "actor", output_dir=tmp_path / "critic") == 0
    assert run_step(3, tmp_path, **trained(tmp_path), output_dir=tmp_path / "final") == 0
    assert metrics(tmp_path / "final")[0]["kl"] == pytest.approx(0, abs=1e-4)


def test_T10_embeddings_with_spare_rows(tmp_path):
    tokenizer = word_tokenizer()
    make_base(tmp_path, model=tiny_llama(64), tokenizer=tokenizer)
    assert len(tokenizer) < 64
    assert run_step(1, tmp_path, model_name_or_path=tmp_path / "base", output_dir=tmp_path / "actor") == 0
    assert run_step(2, tmp_path, model_name_or_path=tmp_path / "actor", output_dir=tmp_path / "critic") == 0
    assert run_step(3, tmp_path, **trained(tmp_path), output_dir=tmp_path / "final", print_answers=True) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "actor").config.vocab_size == 64


def test_T11_the_spelling_of_a_path_changes_nothing(base, tmp_path):
    weights = []
    for name in ("my-llama", "x"):
        shutil.copytree(base / "base", tmp_path / name)
        out = tmp_path / f"{name}-out"
        assert run_step(1, base, model_name_or_path=tmp_path / name, output_dir=out, max_steps=1) == 0
        weights.append(AutoModelForCausalLM.from_pretrained(out).state_dict())
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name])


def test_L02_lora_with_gradient_checkpointing_learns(base, tmp_path):
    flags = {"lora_dim": 2, "lora_module_name": "q_proj, k_proj", "only_optimize_lora": True, "max_steps": 2}
    for name, checkpointing in (("with", True), ("without", None)):
        out = tmp_path / name
        given = {**flags, "gradient_checkpointing": checkpointing, "output_dir": out}
        assert run_step(1, base, model_name_or_path=base / "base", **given) == 0
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("with", "without"))
    start = AutoModelForCausalLM.from_pretrained(base / "base").state_dict()
    changed = {name for name in one if not torch.equal(one[name], start[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj"} and len(changed) == 4
    for name in one:
        torch.testing.assert_close(one[name], two[name])


def test_D02_edited_data_are_seen(tmp_path, capsys):
    make_base(tmp_path)
    flags = {"model_name_or_path": tmp_path / "base", "learning_rate": 0}
    losses = []
    for edit in (None, ("blue", "bad!")):
        train = tmp_path / "data" / "train.jsonl"
        if edit:
            train.write_text(train.read_text().replace(*edit))
        assert run_step(1, tmp_path, **flags, output_dir=tmp_path / f"out{edit is None}", max_steps=1) == 0
        losses.append(metrics(tmp_path / f"out{edit is None}")[-1]["loss"])
    assert losses[0] != losses[1]
    assert capsys.readouterr().out.count("cache miss") == 2


def test_Z04_memory_does_not_grow(tmp_path):
    three_steps(tmp_path)
    sizes = []
    from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer

    original = DeepSpeedPPOTrainer.train_rlhf

    def watched(self, *args):
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
        return original(self, *args)

    DeepSpeedPPOTrainer.train_rlhf = watched
    try:
        flags = {"max_steps": 20, "num_train_epochs": 7}
        assert run_step(3, tmp_path, **trained(tmp_path), **flags) == 0
    finally:
        DeepSpeedPPOTrainer.train_rlhf = original
    assert len(sizes) == 20 and sizes[-1] < 1.1 * sizes[4]


def test_bf16_runs_with_ratio_one(base, tmp_path):
    """P-23: old and new log-probs are computed the same way in low precision."""
    folder = three_steps(tmp_path)
    flags = {"dtype": "bf16", "max_steps": 1, "per_device_mini_train_batch_size": 4, "output_dir": tmp_path / "out"}
    assert run_step(3, folder, **trained(folder), **flags) == 0
    assert metrics(tmp_path / "out")[0]["kl"] == 0
    assert metrics(tmp_path / "out")[0]["first_ratio_deviation"] < 1e-6


def test_positions_learned_absolutely_work_through_all_steps(tmp_path):
    """P-01 end to end: GPT-2's positions, tied embeddings."""
    from tests.tiny import tiny_gpt2

    make_base(tmp_path)
    save_model(tmp_path / "base", tiny_gpt2(57))
    assert run_step(1, tmp_path, model_name_or_path=tmp_path / "base", output_dir=tmp_path / "actor") == 0
    assert run_step(2, tmp_path, model_name_or_path=tmp_path / "actor", output_dir=tmp_path / "critic") == 0
    assert run_step(3, tmp_path, **trained(tmp_path), output_dir=tmp_path / "final") == 0
    assert metrics(tmp_path / "final")[0]["first_ratio_deviation"] < 1e-5
