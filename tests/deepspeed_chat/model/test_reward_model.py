"""Scores at the last token, complete loading, the pair loss, the offset, and saving as transformers' own class."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import (
    PairOutput,
    RewardModel,
    SharedRewardModel,
    ValueOutput,
    check_reward_model,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import (
    convert_linear_layer_to_lora,
    only_optimize_lora_parameters,
)
from tests.tiny import save_model, tiny_gpt2, tiny_llama, word_tokenizer

TEMPLATE = "{{ messages }}"
MODELS = [tiny_gpt2, tiny_llama]


def silent(_text):
    pass


def new(directory, make=tiny_llama, seed=7, **keywords):
    save_model(directory, make(64))
    model = RewardModel.from_causal_lm(str(directory), word_tokenizer(), seed=seed, notice=silent, **keywords)
    with torch.no_grad():
        model.model.score.weight.mul_(20)  # scores of some size
    return model


def padded(texts, side):
    width = max(map(len, texts)) + 1
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        first = width - len(text) if side == "left" else 0
        ids[row, first : first + len(text)] = text
        mask[row, first : first + len(text)] = 1
    return ids, mask


@pytest.fixture
def texts():
    return [torch.randint(4, 57, (length,)) for length in (1, 3, 9, 20)]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_R03_score_and_values_do_not_depend_on_padding(tmp_path, texts, make, side):
    model = new(tmp_path, make)
    ids, mask = padded(texts, side)
    batch = model.forward_value(ids, mask)
    assert batch.scores.dtype == batch.values.dtype == torch.float32 and batch.values.shape == ids.shape
    for row, text in enumerate(texts):
        alone = model.forward_value(text[None], torch.ones(1, len(text)))
        hidden = model.model.base_model(input_ids=text[None]).last_hidden_state
        torch.testing.assert_close(alone.values[0], (hidden @ model.model.score.weight.T)[0, :, 0])
        torch.testing.assert_close(batch.scores[row], alone.values[0, -1], atol=1e-5, rtol=0)  # the fault's own bound
        torch.testing.assert_close(batch.values[row][mask[row].bool()], alone.values[0], atol=1e-5, rtol=0)
        assert (batch.values[row][~mask[row].bool()] == 0).all()
    with pytest.raises(AssertionError):  # the twin: the last column
        torch.testing.assert_close(batch.values[:, -1] if side == "right" else batch.values[:, 0], batch.scores)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("loss", ["end", "per_token"])
def test_R04_the_padding_has_no_part_in_the_loss(tmp_path, make, loss):
    model = new(tmp_path, make)
    ids, mask = padded([torch.tensor([5, 6, 7]), torch.tensor([5, 6, *range(8, 28)])], "right")

    def pair():
        return model(ids, mask, divergence=torch.tensor([2]), margin=0.0, row_mask=torch.ones(1), loss=loss)

    before = pair()
    assert isinstance(before, PairOutput)
    with torch.no_grad():
        model.model.get_input_embeddings().weight[0] = 1e4
    torch.testing.assert_close(pair().loss_sum, before.loss_sum)
    ids[0, 3:] = 50
    torch.testing.assert_close(pair().loss_sum, before.loss_sum)
    pair().loss_sum.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    ids[0, 2] = 50
    assert pair().loss_sum != before.loss_sum


def test_R01_R10_end_loss_with_margin_and_fillers(tmp_path, texts):
    model = new(tmp_path)
    ids, mask = padded(texts, "left")
    scores = model(ids, mask).scores
    assert isinstance(model(ids, mask), ValueOutput)
    margin = torch.tensor([0.5, 0.0])
    out = model(ids, mask, divergence=torch.zeros(2), margin=margin, row_mask=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(out.loss_sum, -F.logsigmoid(scores[0] - scores[2] - 0.5))
    torch.testing.assert_close(out.chosen_scores, scores[:2])
    torch.testing.assert_close(out.rejected_scores, scores[2:])
    with pytest.raises(ValueError, match="per_token"):
        model(ids, mask, divergence=torch.zeros(2), loss="other")


def test_R07_the_head_comes_from_the_seed_alone(tmp_path):
    save_model(tmp_path, tiny_llama(64))
    heads = []
    for seed, noise in ((7, 1), (7, 2), (8, 1)):
        torch.manual_seed(noise)
        model = RewardModel.from_causal_lm(str(tmp_path), word_tokenizer(), seed=seed, notice=silent)
        heads.append(model.model.score.weight.detach().clone())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 16)
    drawn = torch.empty(1, 16).normal_(0, 1 / 17, generator=torch.Generator().manual_seed(7))
    assert torch.equal(heads[0], drawn)


@pytest.mark.parametrize("make", MODELS)
def test_C04_a_saved_reward_model_is_transformers_classifier_with_the_same_scores(tmp_path, texts, make):
    model = new(tmp_path / "base", make)
    save_trained(tmp_path / "rm", model, model.state_dict(), word_tokenizer(), TEMPLATE)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.num_labels == 1 and theirs.config.pad_token_id == 0 != theirs.config.eos_token_id
    again = RewardModel.from_pretrained(str(tmp_path / "rm"), None, notice=silent)
    for side in ("left", "right"):
        ids, mask = padded(texts, side)
        ours = model(ids, mask).scores
        positions = None if side == "right" else (mask.cumsum(1) - 1).clamp(min=0)
        logits = theirs(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 0]
        torch.testing.assert_close(logits, ours, atol=1e-5, rtol=0)  # the design's bound
        assert torch.equal(again(ids, mask).scores, ours)  # equal to all digits


def test_R06_what_is_no_complete_reward_model_is_refused(tmp_path):
    base = save_model(tmp_path / "lm", tiny_llama(64))
    tokenizer = word_tokenizer()

    def load(path):
        return RewardModel.from_pretrained(str(path), tokenizer, notice=silent)

    with pytest.raises(UserError, match="score.weight is missing.*step 2 makes a reward model"):
        load(base)
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nothing")
    model = new(tmp_path / "base").model
    tokenizer.save_pretrained(tmp_path / "rm")
    model.config.architectures = ["LlamaForSequenceClassification"]
    model.config.save_pretrained(tmp_path / "rm")
    state = model.state_dict()
    for change, message in (
        ({"score.weight": None}, "missing weights score.weight.*step 2 makes a reward model"),
        ({"extra.weight": torch.ones(2)}, "unexpected weights extra.weight"),
    ):
        broken = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        torch.save(broken, tmp_path / "rm" / "pytorch_model.bin")
        with pytest.raises(UserError, match=message):
            load(tmp_path / "rm")
    torch.save(state, tmp_path / "rm" / "pytorch_model.bin")
    assert load(tmp_path / "rm").offset is None
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    (tmp_path / "rm" / "config.json").write_text(
        json.dumps({**config, "id2label": {"0": "a", "1": "b"}, "label2id": {}})
    )
    with pytest.raises(UserError, match="2 labels"):
        check_reward_model(str(tmp_path / "rm"))
    (tmp_path / "rm" / "config.json").write_text(json.dumps({**config, "score_offset": "much"}))
    with pytest.raises(UserError, match="score_offset"):
        load(tmp_path / "rm")


def test_R06_a_classifier_with_another_kind_of_head_is_refused(tmp_path):
    BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
                   intermediate_size=32)
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(UserError, match="no linear output layer"):
        RewardModel.from_pretrained(str(tmp_path), None, notice=silent)


@pytest.mark.parametrize("make", MODELS)
def test_folded_normalization_and_its_offset_survive_saving(tmp_path, texts, make):
    model = new(tmp_path / "base", make)
    ids, mask = padded(texts, "left")
    raw = model(ids, mask)
    assert model.offset is None
    mean, std = -30.123456789, 0.37
    model.fold_normalization(mean, std)
    assert model.offset.shape == (1,) and model.offset.dtype == torch.float32
    assert model.head_parameters()[-1] is model.offset
    folded = model(ids, mask)
    torch.testing.assert_close(folded.scores, (raw.scores - mean) / std)
    torch.testing.assert_close(folded.values, (raw.values - mean) / std * mask)
    with torch.no_grad():
        model.offset += 0.5  # trained
    save_trained(tmp_path / "critic", model, model.state_dict(), word_tokenizer(), TEMPLATE)
    again = RewardModel.from_pretrained(str(tmp_path / "critic"), word_tokenizer(), notice=silent)
    torch.testing.assert_close(again(ids, mask).scores, folded.scores + 0.5)
    assert again.offset is not None and again.base_offset == -mean / std + 0.5
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    shifted = (
        theirs(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, 0]
        + theirs.config.score_offset
    )
    torch.testing.assert_close(shifted, again(ids, mask).scores)
    again.fold_normalization(1.0, 2.0)  # a second time
    torch.testing.assert_close(again(ids, mask).scores, (folded.scores + 0.5 - 1) / 2)
    with pytest.raises(AssertionError):
        again.fold_normalization(1.0, 0.0)


def test_half_precision_keeps_offset_and_scores_in_float32(tmp_path, texts):
    model = new(tmp_path)
    ids, mask = padded(texts, "right")
    model.fold_normalization(-300.0, 1.0)
    exact = model(ids, mask).scores
    model.bfloat16()
    out = model(ids, mask)
    assert out.scores.dtype == torch.float32
    torch.testing.assert_close(out.scores, exact, atol=0.3, rtol=0)  # bf16 weights; the offset alone would round by 1
    assert (out.scores - out.scores.round()).abs().max() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.float()(ids, mask).values.dtype == torch.float32


def test_L04_the_head_trains_when_the_decoder_is_frozen(tmp_path, texts):
    model = new(tmp_path)
    model.fold_normalization(0.0, 1.0)
    convert_linear_layer_to_lora(model.model, ("q_proj",), rank=2, alpha=1, seed=0)
    only_optimize_lora_parameters(model.model, also=model.head_parameters())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"model.score.weight", "offset"} < trained
    assert all("lora_" in name for name in trained - {"model.score.weight", "offset"})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(*padded(texts, "right"), divergence=torch.ones(2)).loss_sum.backward()
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    assert "model.score.weight" in changed and changed <= trained
    parts = [*model.head_parameters(), *model.model.base_model.parameters()]
    assert len(parts) == len(list(model.parameters())) == len({id(p) for p in parts})


def test_a_shared_reward_model_is_the_start_of_the_critic(tmp_path, texts):
    critic = new(tmp_path)
    ids, mask = padded(texts, "left")
    expected = critic(ids, mask)
    head = critic.frozen_head()
    critic.fold_normalization(2.0, 3.0)
    convert_linear_layer_to_lora(critic.model, ("q_proj", "up_proj"), rank=2, alpha=4, seed=0)
    reward = SharedRewardModel(critic, critic, head)
    with pytest.raises(AssertionError, match="trained itself"):
        reward(ids, mask)
    only_optimize_lora_parameters(critic.model, also=critic.head_parameters())
    assert list(reward.parameters()) == [] and not reward.state_dict()
    with torch.no_grad():
        for parameter in critic.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)  # adapters and head have moved
    with pytest.raises(AssertionError, match="evaluation mode"):
        critic.train()
        reward(ids, mask)
    critic.eval()
    moved = critic(ids, mask)
    out = reward(ids, mask)
    assert torch.equal(out.scores, expected.scores) and torch.equal(out.values, expected.values)
    assert not torch.allclose(moved.scores, (expected.scores - 2) / 3)
    torch.testing.assert_close(critic(ids, mask), moved)  # the adapters are on again
