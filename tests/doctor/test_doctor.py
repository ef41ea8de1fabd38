"""The doctor on outputs of the steps, on others' models and on broken ones: what it says, and its exit code."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from alpaca_rlhf.doctor.__main__ import main
from alpaca_rlhf.runtime.run import command
from tests.pipeline.steps import run_step, three_steps
from tests.tiny import PAIRS, save_model, sentencepiece_tokenizer, tiny_gpt2, tiny_llama, word_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return three_steps(tmp_path_factory.mktemp("steps"))


@pytest.fixture
def ask(capsys, tmp_path):
    """Call the program and return its exit code, what it printed, and the numbered problems in one line."""

    def call(*words):
        capsys.readouterr()
        code = command(main)([*map(str, words), "--data_output_path", str(tmp_path / "cache")])
        captured = capsys.readouterr()
        found = " ".join(captured.out.partition("\nfound\n")[2].split())
        return code, captured.out + captured.err, found

    return call


def edit(file, **changes):
    """Change names in a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_an_sft_model_with_its_data(done, ask):
    code, page, _ = ask(done / "actor", done / "data", "--step", "1", "--records", 2)
    assert code == 0 and "nothing that would make a training wrong" in page
    assert "made by        step 1 (SFT) on 20" in page and "complete: all 7 files of the output are there" in page
    assert f"from {done / 'base'}" in " ".join(page.split()) and "last figures   step 3: eval_perplexity" in page
    count = sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(done / "actor").parameters())
    assert f"LlamaForCausalLM: {count:,} parameters, 2 layers, hidden size 16, 128 positions" in " ".join(page.split())
    assert "EOS  2 '</s>'   2            2" in page and "BOS and EOS agree" in page
    assert "the tokenizer's own, saved by the step that trained the model (it is human_assistant)" in page
    assert "read           " in page and "usable 24 train, 8 test" in " ".join(page.split())
    assert "whole texts of 24 of 24 records, in tokens: min 10, median 13.5, p95 17, max 17" in " ".join(page.split())
    assert "32 tokens (as the model was trained)" in page and "every record fits" in page
    assert page.count("train.jsonl:") == 2
    for setting in ("step 1, all weights", "step 2, LoRA 8", "step 3, all weights"):
        assert setting in page
    outside = [line for line in page.splitlines() if len(line) > 100]
    assert outside == []


def test_a_reward_model_and_the_output_of_step_3(done, ask):
    code, page, _ = ask(done / "critic")
    assert code == 0 and "step 2 (reward model)" in page and "head           score.weight 1 × 16" in page
    assert "over 8 chosen answers of the evaluation part; measured with" in page and "digests agree" in page
    assert "step 3, LoRA 8" in page and "step 1, " not in page.partition("memory")[2]

    code, page, _ = ask(done / "final")
    assert code == 0 and "final: an output of step 3" in page and "models         actor, critic" in page
    assert "step 3 (PPO): the actor" in page and "step 3 (PPO): the critic" in page
    assert "tokenizers     the same in all of them" in page and "those of the same run as above" in page
    assert "score_offset in config.json" in page and "last figures   step 4: score" in page


def test_data_chooses_the_step_by_its_columns(done, ask, tmp_path):
    assert "as step 2 (reward model) would train it" in ask(done / "actor", done / "data")[1]
    answers = write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "name a colour", "response": "blue"}] * 3)
    assert "as step 1 (SFT) would train it" in ask(done / "actor", answers)[1]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "name a colour"}] * 3)
    page = ask(done / "actor", prompts, "--max_len", 20, "--max_answer_len", 10)[1]
    assert "as step 3 (PPO prompts) would train it" in page and "20 tokens and 10 for the answer (as given)" in page
    code, page, _ = ask(done / "actor", prompts, "--step", 2)
    assert code == 2 and "no `rejected` answers" in page


def test_D09_what_a_limit_drops_is_said_and_too_much_is_a_problem(done, ask, tmp_path):
    code, page, found = ask(done / "actor", done / "data", "--max_len", 12)
    assert code == 1 and "12 tokens (as given)" in page
    assert "dropped: longer than 12 tokens, so that an answer's end would be lost" in page
    assert "records of" in found and "would be dropped at 12 tokens" in found
    code, _, found = ask(done / "actor", done / "data", "--max_len", 3)
    assert code == 1 and "nothing is left of" in found
    long = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "one", "response": "yes " * 9}] * 3)
    code, page, found = ask(done / "actor", long, "--max_len", 11)
    assert code == 1 and "3 of 3 answers of" in found and "have no end" in found


def test_a_limit_beyond_the_positions_is_a_problem_and_a_default_gives_way(done, ask):
    code, page, found = ask(done / "base", done / "data", "--max_len", 129)
    assert code == 1 and "128 positions" in found and "129" in found
    code, page, _ = ask(done / "base", done / "data")
    assert code == 0
    assert "the default of 512 is more than the model's positions: give --max_seq_len 128" in " ".join(page.split())


def test_T01_ids_that_disagree_are_named_with_consequence_and_remedy(ask, tmp_path):
    """An early LLaMA conversion: empty special tokens in the tokenizer, 0 for the end in the configurations."""
    tokenizer = sentencepiece_tokenizer(tmp_path / "sp")
    save_model(tmp_path / "m", tiny_llama(len(tokenizer)), tokenizer)
    shutil.copy(tmp_path / "sp" / "tokenizer.model", tmp_path / "m")
    edit(tmp_path / "m" / "tokenizer_config.json", bos_token="", eos_token="", unk_token="")
    edit(tmp_path / "m" / "config.json", eos_token_id=0)
    edit(tmp_path / "m" / "generation_config.json", eos_token_id=[0, 7])
    code, page, found = ask(tmp_path / "m")
    assert code == 1
    assert "EOS  '', used: 2 '</s>'   0" in page and "0, 7" in page
    assert "declares eos_token '': repaired to '</s>'" in " ".join(page.split())
    assert "EOS is 2 ('</s>') in the tokenizer but 0 in config.json" in found
    assert "but 0, 7 in generation_config.json: programs that trust the file stop at another token, or never" in found
    edit(tmp_path / "m" / "config.json", eos_token_id=2)
    edit(tmp_path / "m" / "generation_config.json", eos_token_id=[0, 2])
    assert ask(tmp_path / "m")[0] == 0  # the tokenizer's end is in the list, and the repair is only told


def test_T02_padding_that_is_the_end_is_explained_and_no_problem(ask, tmp_path):
    save_model(tmp_path / "m", tokenizer=word_tokenizer(pad_is_eos=True))
    code, page, _ = ask(tmp_path / "m")
    assert code == 0
    assert "PAD  '</s>', used: 3 '<unk>'" in page
    assert "PAD is 3" not in page  # one explanation is enough
    assert "PAD as stored is the end token" in page and "nothing is to be done" in " ".join(page.split())


def test_a_beginning_that_differs_and_ids_that_do_not_exist_are_problems(ask, tmp_path):
    save_model(tmp_path / "m")
    edit(tmp_path / "m" / "config.json", bos_token_id=5)
    edit(tmp_path / "m" / "generation_config.json", eos_token_id=9999)
    code, _, found = ask(tmp_path / "m")
    assert code == 1
    assert "BOS is 1 ('<s>') in the tokenizer but 5 in config.json" in found
    assert "eos_token_id is 9999 in generation_config.json, but ids end at" in found


def test_a_tokenizer_without_an_end_is_a_problem(ask, tmp_path):
    save_model(tmp_path / "m")
    edit(tmp_path / "m" / "tokenizer_config.json", eos_token=None)
    write_jsonl(tmp_path / "d.jsonl", PAIRS)
    code, page, found = ask(tmp_path / "m", tmp_path / "d.jsonl")
    assert code == 1 and "has no usable end-of-text token" in found and "not looked at" in page


def test_weights_that_do_not_fit_are_found_without_loading_them(ask, tmp_path, monkeypatch):
    save_model(tmp_path / "m", tiny_llama(57))
    edit(tmp_path / "m" / "config.json", num_hidden_layers=3)

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    code, _, found = ask(tmp_path / "m")
    assert code == 1 and "model.layers.2." in found and "is missing" in found
    edit(tmp_path / "m" / "config.json", num_hidden_layers=2, intermediate_size=64)
    assert "has another shape than config.json says" in ask(tmp_path / "m")[2]
    edit(tmp_path / "m" / "config.json", intermediate_size=32)
    assert ask(tmp_path / "m")[0] == 0
    whole = (tmp_path / "m" / "model.safetensors").read_bytes()
    (tmp_path / "m" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, _, found = ask(tmp_path / "m")
    assert code == 1 and "model.safetensors cannot be read" in found and "cut or damaged" in found


def test_R05_statistics_of_other_weights_are_found(done, ask, tmp_path):
    shutil.copytree(done / "critic", tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    with torch.no_grad():
        model.score.weight.mul_(2)
    model.save_pretrained(tmp_path / "rm")
    code, page, found = ask(tmp_path / "rm")
    assert code == 1 and "measured with other weights" in found and "not usable, see below" in page
    (tmp_path / "rm" / "reward_stats.json").unlink()
    code, page, _ = ask(tmp_path / "rm")
    assert code == 1 and "none: step 3 needs reward_stats.json" in page  # which its list of files says was there


def test_a_classifier_is_no_reward_model(ask, tmp_path):
    save_model(tmp_path / "m")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", num_labels=3)
    model.save_pretrained(tmp_path / "m")
    code, _, found = ask(tmp_path / "m")
    assert code == 1 and "a classifier with 3 labels" in found


def test_an_output_that_is_not_complete(done, ask, tmp_path):
    shutil.copytree(done / "final", tmp_path / "final")
    (tmp_path / "final" / "critic" / "tokenizer_config.json").unlink()
    (tmp_path / "final" / "critic" / ".complete").mkdir()
    code, page, found = ask(tmp_path / "final")
    assert code == 1 and "1 of its" in page and "tokenizer_config.json is missing" in found
    assert "a newer complete output waits in" in found
    shutil.rmtree(tmp_path / "final" / "critic")
    assert "has no critic" in ask(tmp_path / "final")[2]


def test_actor_and_critic_with_two_tokenizers_or_templates(done, ask, tmp_path):
    shutil.copytree(done / "final", tmp_path / "final")
    (tmp_path / "final" / "critic" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    code, _, found = ask(tmp_path / "final")
    assert code == 1 and "was trained with another chat template" in found
    vocabulary = json.loads((tmp_path / "final" / "critic" / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["cat"], words["dog"] = words["dog"], words["cat"]
    (tmp_path / "final" / "critic" / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "must share one" in ask(tmp_path / "final")[2]


def test_an_adapter_is_described_on_its_base(done, ask, tmp_path):
    lora = {"lora_dim": 2, "lora_module_name": "q_proj,v_proj", "only_optimize_lora": True, "save_adapter": True}
    flags = {"model_name_or_path": done / "base", "output_dir": tmp_path / "out", "max_steps": 1}
    assert run_step(1, done, **flags, **lora) == 0
    code, page, _ = ask(tmp_path / "out" / "adapter")
    assert code == 0 and "a LoRA adapter only" in page
    assert f"LORA of rank 2, alpha 1.0, on 4 layers of {done / 'base'}" in " ".join(page.split())
    (tmp_path / "out" / "adapter" / "adapter_model.safetensors").unlink()
    code, _, found = ask(tmp_path / "out" / "adapter")
    assert code == 1 and "holds no adapter_model file" in found
    code, page, _ = ask(tmp_path / "out")
    assert "LoRA of rank 2 alone" in " ".join(page.split())


def test_a_foreign_model_with_other_names_of_its_weights_is_left_to_loading(ask, tmp_path):
    """GPT-2 as it was published names its tensors without the module's prefix."""
    from safetensors.torch import load_file, save_file

    save_model(tmp_path / "m", tiny_gpt2(57))
    code, page, _ = ask(tmp_path / "m")
    assert code == 0 and "only loading can check" not in " ".join(page.split())  # its tied head is not missed
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    code, page, _ = ask(tmp_path / "m")
    assert code == 0 and "which only loading can check" in " ".join(page.split())


def test_an_attention_without_keys_of_its_own_and_unknown_words(ask, tmp_path):
    config = GPT2Config(vocab_size=57, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    save_model(tmp_path / "m", GPT2LMHeadModel(config))
    foreign = [{"prompt": "bonjour tout le monde", "response": "rouge"}] * 4
    code, page, found = ask(tmp_path / "m", write_jsonl(tmp_path / "french.jsonl", foreign))
    assert code == 1 and "unknown to the tokenizer" in found and "64 positions" in page


@pytest.mark.parametrize(
    "words, said",
    [
        (["./nothing"], "does not exist"),
        (["."], "holds no model (no config.json)"),
        (["{base}", "./nothing.jsonl"], "there is no file or folder"),
        (["{base}", "--records", "0"], "--records is 0; it must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(done, ask, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, page, _ = ask(*(word.format(base=done / "base") for word in words))
    assert code == 2 and page.count("error: ") == 1 and said in page


def test_the_metrics_of_a_killed_run_and_its_alarms(done, ask, tmp_path):
    shutil.copytree(done / "final", tmp_path / "final")
    log = tmp_path / "final" / "metrics.jsonl"
    *lines, last = log.read_text().splitlines()
    log.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"alarms": 1, "alarm/kl_high": 1.0})]))
    assert "alarms that held at the end: kl_high" in ask(tmp_path / "final")[1]
    log.write_text("\n".join([*lines, last[:20]]))
    code, page, _ = ask(tmp_path / "final")
    assert code == 0 and "metrics.jsonl is damaged at line 2" in page
