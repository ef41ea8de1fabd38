"""--reward_fn FILE.py:NAME: a user's function in the place of the reward model, in real runs of step 3."""

import json
import traceback

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import rlhf_engine
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import (
    FunctionReward,
    load_reward_function,
)
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Sequences
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from tests.pipeline.steps import make_base, metrics, run_step, three_steps, trained
from tests.tiny import word_tokenizer

SCORER = """
import json, pathlib

def words(prompts, answers):
    with (pathlib.Path(__file__).parent / "calls.jsonl").open("a") as file:
        file.write(json.dumps([prompts, answers]) + "\\n")
    return [len(answer.split()) / 8 - 0.0625 for answer in answers]

number = 3

def one_missing(prompts, answers):
    return [0.0] * (len(answers) - 1)

def names(prompts, answers):
    return ["good"] * len(answers)

def none(prompts, answers):
    return None

def broken(prompts, answers):
    return [1 / 0 for _ in answers]

def not_finite(prompts, answers):
    return [float("nan")] * len(answers)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return three_steps(tmp_path_factory.mktemp("steps"))


@pytest.fixture
def scorer(tmp_path):
    (tmp_path / "scorer.py").write_text(SCORER)
    return tmp_path / "scorer.py"


@pytest.fixture
def rollouts(monkeypatch):
    """Trainer and experience of every rollout."""
    seen, original = [], DeepSpeedPPOTrainer.generate_experience

    def spy(self, *args):
        rollout = original(self, *args)
        seen.append((self, rollout.experience))
        return rollout

    monkeypatch.setattr(DeepSpeedPPOTrainer, "generate_experience", spy)
    return seen


def run(base, scorer, name="words", **flags):
    given = {"actor_model_name_or_path": base / "base", "reward_fn": f"{scorer}:{name}"}
    return run_step(3, base, **given | flags)


def state(kind, folder):
    return kind.from_pretrained(folder).state_dict()


def test_it_gets_the_texts_of_the_rollout_and_its_scores_are_the_rewards(base, scorer, tmp_path, rollouts):
    assert run(base, scorer, output_dir=tmp_path / "out", max_steps=1, kl_coef=0, per_device_train_batch_size=12) == 0
    (_, rollout), tokenizer = rollouts[0], word_tokenizer()
    ((prompts, answers),) = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    ended = 0
    for row in range(12):
        length = int(rollout.response_mask[row].sum())
        ids = rollout.responses[row, :length].tolist()
        ended += ids[-1] == tokenizer.eos_token_id
        kept = [token for token in ids if token not in tokenizer.all_special_ids]
        assert answers[row].split() == tokenizer.convert_ids_to_tokens(kept)
        assert prompts[row].startswith("Human : ") and prompts[row].endswith("Assistant :")
        assert len(prompts[row].split()) + 1 == int(rollout.attention_mask[row].sum()) - length  # and the BOS
        score = len(answers[row].split()) / 8 - 0.0625
        assert rollout.scores[row] == rollout.rewards[row, length - 1] == rollout.rewards[row].sum() == score
    assert 0 < ended < 12  # both kinds were looked at
    record = metrics(tmp_path / "out")[0]
    assert record["score"] == record["normalized_score"] == float(rollout.scores.double().mean())


def test_outputs_are_complete_and_say_where_the_scores_came_from(base, scorer, tmp_path):
    assert run(base, scorer, output_dir=tmp_path / "out") == 0
    for name, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        _, info = kind.from_pretrained(tmp_path / "out" / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        saved = json.loads((tmp_path / "out" / name / "training_arguments.json").read_text())
        assert saved["reward_fn"] == f"{scorer}:words" and saved["critic"]["path"] is None
        assert saved["ppo"]["reward_normalization"] == "off"
    assert "score_offset" not in json.loads((tmp_path / "out" / "critic" / "config.json").read_text())


def test_without_a_model_of_its_own_the_critic_is_the_actors_with_a_new_head(base, scorer, tmp_path):
    assert run(base, scorer, output_dir=tmp_path / "out", critic_learning_rate=0, max_steps=1) == 0
    actor, critic = state(AutoModelForCausalLM, base / "base"), state(
        AutoModelForSequenceClassification, tmp_path / "out" / "critic"
    )
    assert {name for name in actor if name not in critic} == {"lm_head.weight"}
    assert all(torch.equal(critic[name], actor[name]) for name in actor if name in critic)


def test_a_given_model_starts_the_critic_and_does_not_score(done, scorer, tmp_path, rollouts):
    flags = {**trained(done), "critic_learning_rate": 0, "max_steps": 1, "output_dir": tmp_path / "out"}
    assert run(done, scorer, **flags) == 0
    places = (done / "critic", tmp_path / "out" / "critic")
    before, after = (state(AutoModelForSequenceClassification, place) for place in places)
    assert all(torch.equal(before[name], after[name]) for name in before)
    _, rollout = rollouts[0]
    assert bool((rollout.scores * 8 % 1 == 0.5).all())


def test_running_normalisation_works_on_a_functions_scores(base, scorer, tmp_path, rollouts):
    assert run(base, scorer, reward_normalization="running", max_steps=1, output_dir=tmp_path / "out") == 0
    assert metrics(tmp_path / "out")[0]["normalized_score"] == pytest.approx(0, abs=1e-6)
    assert metrics(tmp_path / "out")[0]["score"] > 0


def test_with_lora_no_reward_model_is_held(done, scorer, tmp_path, monkeypatch, rollouts):
    loads = []

    def spied(name):
        original = getattr(RewardModel, name)
        return lambda *args, **more: loads.append(name) or original(*args, **more)

    for name in ("from_pretrained", "from_causal_lm"):
        monkeypatch.setattr(RewardModel, name, spied(name))
    lora = {"actor_lora_dim": 2, "critic_lora_dim": 2, "only_optimize_lora": True, "max_steps": 1}
    assert run(done, scorer, **lora, output_dir=tmp_path / "new") == 0
    assert run(done, scorer, **lora, **trained(done), output_dir=tmp_path / "given") == 0
    assert loads == ["from_causal_lm", "from_pretrained"]
    assert all(isinstance(trainer.roles.reward, FunctionReward) for trainer, _ in rollouts)
    base, critic = state(AutoModelForCausalLM, done / "base"), state(
        AutoModelForSequenceClassification, tmp_path / "new" / "critic"
    )
    changed = {name for name in base if name in critic and not torch.equal(base[name], critic[name])}
    assert changed and all("_proj" in name for name in changed)  # adapters on every linear layer, merged


def test_what_the_function_raises_keeps_its_traceback(base, scorer):
    with pytest.raises(ZeroDivisionError) as error:
        run(base, scorer, "broken")
    assert any(frame.filename == str(scorer) and frame.name == "broken" for frame in traceback.extract_tb(error.tb))


@pytest.mark.parametrize(
    "name, parts", [("one_missing", ("3 numbers", "4 answers")), ("names", ("4 values", "4 answers", "list")),
                    ("none", ("NoneType", "4 answers"))]
)  # fmt: skip
def test_other_than_one_number_for_each_answer_is_refused_with_both_counts(base, scorer, capsys, name, parts):
    assert run(base, scorer, name) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "--reward_fn" in line and all(part in line for part in parts)


def test_P14_scores_that_are_not_finite_skip_the_rollout(base, scorer, tmp_path, capsys):
    assert run(base, scorer, "not_finite", max_steps=1, output_dir=tmp_path / "out") == 0
    assert "4 of 4 scores of rollout 1 were not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    "place, part",
    [("nowhere.py:words", "nowhere.py"), ("scorer.py:misspelt", "defines no misspelt"), ("scorer.py:number", "int")],
)
def test_a_function_that_is_not_there_is_found_before_a_model_loads(base, scorer, capsys, monkeypatch, place, part):
    monkeypatch.setattr(rlhf_engine, "load_causal_lm", lambda *a, **k: pytest.fail("a model was loaded first"))
    flags = {"actor_model_name_or_path": base / "base", "reward_fn": scorer.parent / place}
    assert run_step(3, base, **flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "--reward_fn" in line and part in line


def test_an_error_in_the_file_itself_keeps_its_traceback(tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        load_reward_function(f"{tmp_path / 'bad.py'}:score")


def test_a_changed_file_is_read_again(tmp_path):
    for value in (1, 22):
        (tmp_path / "f.py").write_text(f"def score(prompts, answers): return {value}\n")
        assert load_reward_function(f"{tmp_path / 'f.py'}:score")([], []) == value


SEQUENCES = Sequences(
    torch.tensor([[0, 5, 6, 7, 2], [5, 6, 8, 9, 10]]), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    torch.tensor([[1, 1, 0], [1, 1, 1]])[:, :3], 2,
)  # fmt: skip


def scored(returned):
    return FunctionReward(lambda prompts, answers: returned, word_tokenizer()).score(SEQUENCES, torch.ones(2).bool())


@pytest.mark.parametrize(
    "returned",
    [[1, 0], (1.0, 0.0), [True, False], numpy.array([1, 0]), [numpy.float32(1), numpy.float64(0)],
     torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True), [torch.tensor(1.0), torch.tensor(0.0)]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_every_usual_way_to_write_numbers_is_taken(returned):
    scores = scored(returned)
    assert scores.tolist() == [1.0, 0.0] and scores.dtype == torch.float32 and not scores.requires_grad


@pytest.mark.parametrize(
    "returned",
    [[1.0], [1.0, 2.0, 3.0], torch.zeros(2, 1), 1.0, [1j, 2j], [None, 1.0], ["1", "2"], "ab", {0: 1.0, 1: 2.0},
     iter([1.0, 2.0]), [10**400, 1]],
    ids=lambda value: repr(value).partition(" object at")[0][:40],  # the same in every process that collects
)  # fmt: skip
def test_anything_else_is_refused(returned):
    with pytest.raises(UserError, match="2 numbers, one for each of the 2 answers"):
        scored(returned)


def test_padding_and_what_stands_after_the_end_are_not_shown():
    texts = []
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    sequences = SEQUENCES._replace(attention_mask=mask, response_mask=mask[:, 2:])
    function = lambda prompts, answers: texts.extend([prompts, answers]) or [0, 0]  # noqa: E731
    FunctionReward(function, word_tokenizer()).score(sequences, torch.ones(2).bool())
    words = word_tokenizer().convert_ids_to_tokens(range(12))
    assert texts == [[words[5], f"{words[5]} {words[6]}"],
                     [f"{words[6]} {words[7]}", f"{words[8]} {words[9]} {words[10]}"]]  # fmt: skip
