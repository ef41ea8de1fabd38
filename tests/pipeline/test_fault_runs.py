"""One chain of the three steps under hard conditions, and what has to be true of what it leaves behind.

The network is blocked, the tokenizer is a sentencepiece one with settings of its own, only adapters are trained, and
the base model's directory is moved away after step 1. Then: short runs that meet one fault each.
"""

import json
import math
import re
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer
from alpaca_rlhf.engines.plain import PlainEngine
from alpaca_rlhf.evaluation.compare_models import main as compare_models
from alpaca_rlhf.runtime.run import command
from tests.pipeline.steps import make_base, metrics, run_step, trained, write_data
from tests.tiny import PAIRS, save_model, sentencepiece_tokenizer, tiny_llama, write_jsonl

LORA = {"lora_dim": 2, "lora_module_name": "q_proj, k_proj", "only_optimize_lora": True}
STEP_3 = {"max_prompt_seq_len": 64, "num_warmup_steps": 0}
RATIO = re.compile("share|accuracy|distinct|variance|skipped|correlation|deviation")
PAGE = (Path(__file__).parents[2] / "docs" / "MATHS.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    write_data(folder / "data")
    own_settings = {"add_eos_token": True, "padding_side": "right", "model_max_length": 100}
    tokenizer = type(sentencepiece_tokenizer(folder / "sp")).from_pretrained(folder / "sp", **own_settings)
    save_model(folder / "base", tiny_llama(len(tokenizer)), tokenizer)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, lambda *words: asked.append(words))
        patch.setattr(socket, "getaddrinfo", lambda *words, **more: asked.append(words))
        flags = {**LORA, "max_seq_len": 90, "num_train_epochs": 2, "learning_rate": 1e-5, "lora_learning_rate": 5e-4}
        flags |= {"save_adapter": True, "model_name_or_path": folder / "base", "output_dir": folder / "actor"}
        assert run_step(1, folder, **flags) == 0
        (folder / "base").rename(folder / "elsewhere")
        flags = {**LORA, "max_seq_len": 90, "num_train_epochs": 2, "model_name_or_path": folder / "actor"}
        assert run_step(2, folder, **flags, output_dir=folder / "critic") == 0
        assert run_step(3, folder, **trained(folder), **STEP_3, output_dir=folder / "final") == 0
        models = ["--models", folder / "actor", folder / "final" / "actor", "--names", "sft", "ppo"]
        write_jsonl(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in PAIRS[:2]])
        words = ["--prompts", folder / "prompts.jsonl", "--output_dir", folder / "compared", *models]
        lengths = ["--max_prompt_seq_len", 64, "--max_answer_seq_len", 8]
        assert command(compare_models)([str(word) for word in [*words, *lengths]]) == 0
    (folder / "asked").write_text(repr(asked))
    return folder


def test_M05_Z05_no_step_asks_the_network(done):
    assert (done / "asked").read_text() == "[]"


def test_T07_every_output_serves_alone_after_the_base_is_gone(done):
    assert not (done / "base").exists()
    for name in ("actor", "critic", "final/actor", "final/critic"):
        texts = [file.read_text() for file in (done / name).glob("*config*.json")]
        assert len(texts) >= 2 and not any(str(done / "base") in text for text in texts), name
        assert AutoTokenizer.from_pretrained(done / name).chat_template
    answers = json.loads((done / "compared" / "comparison.json").read_text())["models"]
    assert answers["sft"]["count"] == answers["ppo"]["count"] == 2


@pytest.mark.parametrize("name", ["actor", "critic", "final/actor", "final/critic"])
def test_T08_no_step_changes_the_tokenizer_but_for_its_template(done, name):
    before, after = (AutoTokenizer.from_pretrained(done / place) for place in ("elsewhere", name))
    assert (done / name / "tokenizer.json").read_bytes() == (done / "elsewhere" / "tokenizer.json").read_bytes()
    settings = [json.loads((done / place / "tokenizer_config.json").read_text()) for place in ("elsewhere", name)]
    changed = {key for key in settings[0] | settings[1] if settings[0].get(key) != settings[1].get(key)}
    assert changed <= {"chat_template", "pad_token", "name_or_path", "is_local"}, changed
    assert (after.padding_side, after.model_max_length) == ("right", 100)
    for text in ("a b", "name a colour ]{", ""):
        assert after(text)["input_ids"] == before(text)["input_ids"]
        assert after(text)["input_ids"][-1] == after.eos_token_id  # as its own setting says; the steps do not care


def test_M06_two_epochs_of_three_steps_count_to_six(done):
    assert [record["step"] for record in metrics(done / "actor")] == list(range(7))
    assert [record["epoch"] for record in metrics(done / "actor") if "epoch" in record] == [0, 0, 0, 1, 1, 1]


def test_L03_the_log_shows_the_rate_of_the_adapters(done):
    first = metrics(done / "actor")[1]
    assert {name: rate for name, rate in first.items() if name.startswith("learning_rate")} == {
        "learning_rate/lora": 5e-4
    }


def test_L04_adapters_and_head_train_and_nothing_else(done):
    start = AutoModelForCausalLM.from_pretrained(done / "actor").state_dict()
    critic = AutoModelForSequenceClassification.from_pretrained(done / "critic").state_dict()
    changed = {name.split(".")[-2] for name in critic if name in start and not torch.equal(critic[name], start[name])}
    assert changed == {"q_proj", "k_proj"}
    drawn = torch.empty(1, 16).normal_(0, 1 / 17, generator=torch.Generator().manual_seed(1234))
    assert not torch.equal(critic["score.weight"], drawn) and critic["score.weight"].shape == (1, 16)


def test_L06_ppo_starts_from_the_fine_tuned_policy_merged_or_as_an_adapter(done, monkeypatch):
    """Its reference is the SFT model and not the base, its first answers are the SFT model's, the KL is 0."""
    seen, original = [], DeepSpeedPPOTrainer.generate_experience

    def spy(self, *words):
        made = original(self, *words)
        seen.append((made.experience, made.figures))
        return made

    monkeypatch.setattr(DeepSpeedPPOTrainer, "generate_experience", spy)
    (done / "elsewhere").rename(done / "base")
    try:
        for actor in ("actor", "actor/adapter", "base"):
            flags = {"actor_model_name_or_path": done / actor, "critic_model_name_or_path": done / "critic"}
            assert run_step(3, done, **flags, **STEP_3, max_steps=1) == 0
    finally:
        (done / "base").rename(done / "elsewhere")
    (merged, figures), (adapter, more), (base, _) = seen
    assert figures["kl"] == more["kl"] == 0
    assert torch.equal(merged.sequences, adapter.sequences)
    torch.testing.assert_close(merged.ref_log_probs, adapter.ref_log_probs)
    same_answers = base.sequences.shape == merged.sequences.shape and torch.equal(base.sequences, merged.sequences)
    assert not (same_answers and torch.equal(base.ref_log_probs, merged.ref_log_probs))
    model = AutoModelForCausalLM.from_pretrained(done / "actor")
    row = merged.attention_mask[0].bool()
    ids = merged.sequences[0][row][None]
    log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    count = int(merged.response_mask[0].sum())
    torch.testing.assert_close(log_probs[-count:], merged.ref_log_probs[0, :count], atol=1e-5, rtol=1e-5)


def test_D09_D10_the_records_of_each_step_and_the_split_are_saved_with_its_output(done):
    shares = {"actor": ([1.0, 0.0, 0.0], 24), "critic": ([0.0, 1.0, 1.0], 12), "final/actor": ([0.0, 1.0, 1.0], 12)}
    for name, (split, used) in shares.items():
        saved = json.loads((done / name / "training_arguments.json").read_text())
        assert saved["data"]["split"] == split and saved["data"]["seed"] == 1234
        assert saved["data_report"]["train"]["used"] == used == 24 - saved["data_report"]["sets"][0]["other_steps"]


def test_M07_every_ratio_of_the_log_has_a_definition_on_the_maths_page(done):
    names = {name for place in ("actor", "critic", "final") for record in metrics(done / place) for name in record}
    ratios = {name for name in names if RATIO.search(name)}
    assert {"clip_share", "padding_share", "eval_accuracy", "explained_variance"} <= ratios
    assert sorted(name for name in ratios if f"`{name}`" not in PAGE) == []


# ---- runs that meet one fault each


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("step", [1, 2])
def test_D06_without_records_to_hold_out_a_step_says_so_and_ends_well(base, tmp_path, capsys, step):
    data = write_jsonl(tmp_path / "few.jsonl", PAIRS)
    flags = {"model_name_or_path": base / "base", "data_path": data, "max_steps": 1, "output_dir": tmp_path / "out"}
    assert run_step(step, base, **flags) == 0
    assert "no evaluation set" in capsys.readouterr().out
    assert not any(name.startswith("eval") for record in metrics(tmp_path / "out") for name in record)
    if step == 2:  # then the scores are measured on what there is, and the file says on what
        stats = json.loads((tmp_path / "out" / "reward_stats.json").read_text())
        assert stats["population"] == "chosen answers of the training part" and stats["count"] == 4


def test_M03_perplexity_is_of_all_tokens_whatever_the_batch(base, tmp_path):
    found = []
    for size in (1, 3, 8):
        flags = {"per_device_eval_batch_size": size, "max_steps": 1, "learning_rate": 0, "output_dir": tmp_path / "out"}
        assert run_step(1, base, model_name_or_path=base / "base", **flags) == 0
        found.append(metrics(tmp_path / "out")[0])
    model, tokenizer = (kind.from_pretrained(base / "base") for kind in (AutoModelForCausalLM, AutoTokenizer))
    loss = count = 0.0
    for pair in PAIRS:  # by hand: the answer's words and the EOS behind "<s> prompt"
        ids = tokenizer("<s>" + pair["prompt"] + pair["chosen"] + "</s>", add_special_tokens=False)["input_ids"]
        trained = len(tokenizer(pair["chosen"])["input_ids"]) + 1
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        loss -= sum(log_probs[t - 1, ids[t]].item() for t in range(len(ids) - trained, len(ids)))
        count += trained
    for record in found:
        assert record["eval_tokens"] == count
        assert record["eval_perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)


def test_S04_the_gradient_is_that_of_the_mean_over_the_tokens_of_the_step(base, tmp_path):
    """By hand, for one step of 8 records in micro-batches of 2; the norm that is logged is the one before clipping."""
    flags = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    data = write_jsonl(tmp_path / "eight.jsonl", PAIRS)
    flags |= {"data_path": data, "output_dir": tmp_path / "out", "model_name_or_path": base / "base"}
    assert run_step(1, base, **flags) == 0
    model, tokenizer = (kind.from_pretrained(base / "base") for kind in (AutoModelForCausalLM, AutoTokenizer))
    losses = []
    for pair in PAIRS:
        ids = tokenizer("<s>" + pair["prompt"] + pair["chosen"] + "</s>", add_special_tokens=False)["input_ids"]
        trained = len(tokenizer(pair["chosen"])["input_ids"]) + 1
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        losses += [-log_probs[t - 1, ids[t]] for t in range(len(ids) - trained, len(ids))]
    loss = torch.stack(losses).mean()
    norm = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    record = metrics(tmp_path / "out")[-1]
    assert record["tokens"] == len(losses) and record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def broken_from(monkeypatch, first: int, last: int) -> None:
    """Gradients of the optimizer steps ``first`` to ``last`` are NaN; the loss itself looks well."""
    original, calls = PlainEngine.accumulate, []

    def accumulate(self, loss, last):
        calls.append(1)
        bad = first <= len(calls) <= until
        return original(self, loss * (math.nan if bad else 1.0), last)

    until = last
    monkeypatch.setattr(PlainEngine, "accumulate", accumulate)


@pytest.mark.parametrize("step, kind", [(1, AutoModelForCausalLM), (2, AutoModelForSequenceClassification)])
def test_P14_steps_1_and_2_skip_what_is_not_finite_and_stop_with_the_last_good_weights(
    base, tmp_path, monkeypatch, capsys, step, kind
):
    flags = {"model_name_or_path": base / "base", "lr_scheduler_type": "constant", "num_train_epochs": 2}
    flags |= {"per_device_train_batch_size": 8, "max_skipped_steps": 1}

    def weights(name):
        return kind.from_pretrained(tmp_path / name).state_dict()

    assert run_step(step, base, **flags, max_steps=1, output_dir=tmp_path / "one") == 0
    with monkeypatch.context() as patch:
        broken_from(patch, 2, 2)
        assert run_step(step, base, **flags, max_steps=3, output_dir=tmp_path / "skipped") == 0
    assert [record.get("skipped") for record in metrics(tmp_path / "skipped")][1:] == [0.0, 1.0, 0.0]
    assert all(tensor.isfinite().all() for tensor in weights("skipped").values())
    with monkeypatch.context() as patch:
        broken_from(patch, 2, 99)
        assert run_step(step, base, **flags, max_steps=4, output_dir=tmp_path / "stopped") == 2
    assert "step 3" in capsys.readouterr().err
    one, stopped = weights("one"), weights("stopped")
    assert all(torch.equal(one[name], stopped[name]) for name in one)
