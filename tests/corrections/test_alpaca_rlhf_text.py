"""What alpaca-rlhf corrected in DeepSpeed-Chat's texts and batches, and what is left to correct in its own way.

Each test writes the old behaviour down in a few lines (``old_…``), from its description, and shows on a small input
which property it breaks and that ours keeps it.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning.main import batch_loss
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF, collate_sft
from alpaca_rlhf.deepspeed_chat.training.utils.data.layouts import (
    Conversation,
    Skipped,
    convert_rows,
    recognise_layout,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer
from alpaca_rlhf.rollout.base import SamplingSettings
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout
from tests.deepspeed_chat.data.data_samples import A, U, make, only, talk, words
from tests.tiny import PAIRS, save_model, sentencepiece_tokenizer, tiny_llama, word_tokenizer, write_jsonl

BOS, EOS, PAD = 1, 2, 0  # of the word tokenizer


@pytest.fixture
def encoder():
    return TextEncoder(word_tokenizer())


def decoded(encoder, ids) -> str:
    return encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_B03_special_ids_come_from_the_tokenizer_and_agree_everywhere(tmp_path):
    """The hub's LLaMA named EOS 1 and PAD -1 in its configuration; alpaca-rlhf sets 0, 1, 2 by hand, on any model."""
    core = copy.deepcopy(word_tokenizer().backend_tokenizer)
    turned = PreTrainedTokenizerFast(  # its EOS is an ordinary word's id in LLaMA, and LLaMA's 2 is no end here
        tokenizer_object=core, bos_token="sky", eos_token="moon", unk_token="<unk>", pad_token="<pad>"
    )
    for name, tokenizer in (("llama", word_tokenizer()), ("other", turned)):
        model = tiny_llama(len(tokenizer))
        model.config.eos_token_id, model.config.pad_token_id = 1, -1
        model.generation_config.eos_token_id = 1
        save_model(tmp_path / name, model, tokenizer)
        loaded_tokenizer = load_tokenizer(str(tmp_path / name), notice=str)
        loaded = load_causal_lm(str(tmp_path / name), loaded_tokenizer, notice=str)
        own = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        for holder in (loaded_tokenizer, loaded.config, loaded.generation_config):
            assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == own
        old_by_hand = (1, 2, 0)
        assert (old_by_hand == own) is (name == "llama")


def test_B04_the_answer_and_its_eos_are_trained_and_the_beginning_of_the_text_stays(encoder):
    item = only(talk(8, 3), 1, encoder, 64).item
    trained = [i for i, t in zip(item["input_ids"].tolist(), item["trained"].tolist(), strict=True) if t]
    assert decoded(encoder, trained) == "cat cat cat </s>"  # as many as the answer has tokens, and the EOS
    old_trained_everything = item["input_ids"].tolist()
    assert len(old_trained_everything) == len(trained) + 8

    too_long = encoder.conversation_ids([U(words(3))], words(9))[0]
    old_kept_the_last = too_long[-12:]
    assert BOS not in old_kept_the_last and "Human" not in decoded(encoder, old_kept_the_last)
    ours = only(talk(8, 9), 1, encoder, 12).item["input_ids"].tolist()
    assert ours[0] == BOS and decoded(encoder, ours).startswith("<s> Human :")
    assert ours[-1] != EOS  # a cut answer is not taught to end where the limit is


def test_B05_the_end_is_one_id_and_not_the_pieces_of_a_marker(tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    encoder = TextEncoder(tokenizer)
    old_end = tokenizer("yes<|endoftext|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_id not in old_end and len(old_end) > 3  # no stop by id can ever fire on it
    answer = encoder.answer_ids([U("name a colour")], "yes")
    assert answer[-1] == tokenizer.eos_token_id and answer.count(tokenizer.eos_token_id) == 1
    assert "endoftext" not in decoded(encoder, answer)


def old_sft_loss(model, batch):
    """Labels are a copy of the ids: prompt and padding are learnt too, and the mean is over all of them."""
    logits = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def test_B06_labels_are_not_the_input_and_padding_is_not_learnt(encoder):
    model = CausalLM(tiny_llama(57))
    items = [only(talk(6, answer), 1, encoder, 64).item for answer in (1, 5)]
    narrow = collate_sft(items, 2, PAD)
    assert narrow["input_ids"].shape[1] == 12
    wide = {name: F.pad(tensor, (0, 28), value=PAD) for name, tensor in narrow.items()}
    counts = narrow["response_mask"].sum()
    ours = [batch_loss(model, batch) / counts for batch in (narrow, wide)]
    torch.testing.assert_close(ours[0], ours[1])
    old = [old_sft_loss(model, batch) for batch in (narrow, wide)]
    assert abs(old[0] - old[1]) > 0.01
    by_hand = []  # the cross-entropy of the answers' tokens and nothing else, one token after the other
    for item in items:
        log_probs = model.model(input_ids=torch.tensor(item["input_ids"])[None].long()).logits[0].log_softmax(-1)
        trained = [t for t, counted in enumerate(item["trained"]) if counted]
        by_hand += [-log_probs[t - 1, item["input_ids"][t]] for t in trained]
    assert len(by_hand) == counts == 2 + 6
    torch.testing.assert_close(ours[0], torch.stack(by_hand).mean())


def test_B07_a_history_in_the_instruction_is_turns_and_not_one_long_question(encoder):
    row = {"instruction": " Human: name a cat Assistant: yes Human: why Assistant:", "input": "", "output": "no"}
    old_prompt = f" Human: {row['instruction']} Assistant:"  # the way of every other data set
    assert old_prompt.count("Human:") == 3 and old_prompt.endswith("Assistant: Assistant:")
    (record,) = convert_rows(recognise_layout(set(row)), "f", [(1, row)], Skipped())
    assert record.prompt == (U("name a cat"), A("yes"), U("why"))
    text = decoded(encoder, encoder.prompt_ids(record.prompt))
    assert text.count("Human :") == 2 and text.endswith("why Assistant :")
    item = only(record, 1, encoder, 64).item  # and each answer of the assistant is trained, not the last one alone
    trained = [i for i, t in zip(item["input_ids"], item["trained"], strict=True) if t]
    assert decoded(encoder, trained) == "yes </s> no </s>"


def test_B09_a_pair_ends_in_eos_whatever_the_folder_is_called(tmp_path):
    ends = {}
    for name in ("my-llama", "x"):
        save_model(tmp_path / name)
        tokenizer = load_tokenizer(str(tmp_path / name), notice=str)
        path = write_jsonl(tmp_path / f"{name}.jsonl", PAIRS)
        pair = make(path, 2, TextEncoder(tokenizer), tmp_path / name, split=(0, 1, 0)).train[0]
        assert pair["chosen_ids"][-1] == pair["rejected_ids"][-1] == EOS
        old = tokenizer("blue")["input_ids"] + [EOS] * ("llama" in str(tmp_path / name).rsplit("/", 1)[-1])
        ends[name] = pair["chosen_ids"], old
    assert ends["my-llama"][0] == ends["x"][0]
    assert ends["my-llama"][1] != ends["x"][1]


def test_B11_a_prompt_does_not_end_in_eos(tmp_path):
    """Step 2's tokenizer adds an EOS to every text; the same tokenizer in step 3 told the policy that all was said."""
    sentencepiece_tokenizer(tmp_path)
    tokenizer = type(sentencepiece_tokenizer(tmp_path)).from_pretrained(tmp_path, add_eos_token=True)
    encoder = TextEncoder(tokenizer)
    turns = [U("name a colour")]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": turns[0].text}], chat_template=encoder.chat_template, tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    old = tokenizer(text)["input_ids"]
    assert old[-1] == tokenizer.eos_token_id
    ours = encoder.prompt_ids(turns)
    assert tokenizer.eos_token_id not in ours
    assert encoder.conversation_ids(turns, "blue")[0][: len(ours)] == ours  # what was trained before the answer


@pytest.mark.parametrize("keep", [11, 12], ids=["DeepSpeed-Chat, one short", "alpaca-rlhf"])
def test_B12_a_long_prompt_keeps_its_beginning_and_its_end(encoder, keep):
    turns = (U(words(4)), A("yes"), U("why"))
    whole = encoder.prompt_ids(turns)
    assert len(whole) == 16
    old = whole[-keep:]
    assert BOS not in old and not decoded(encoder, old).startswith("Human")  # in the middle of somebody's words
    ours = only(Conversation("f:1", turns, "", None), 3, encoder, 12).item["prompt_ids"].tolist()
    assert ours == encoder.prompt_ids([U("why")]) and len(ours) <= 12
    assert ours[0] == BOS and decoded(encoder, ours).endswith("Assistant :")
    one_turn = Conversation("f:1", (U(words(20)),), "", None)
    assert only(one_turn, 3, encoder, 12).item is None  # nothing whole is left of it, so it goes


def old_right_padded(items):
    """Padding after the prompt, with whatever the last field of the last record holds."""
    pad_id, width = items[-1]["prompt_ids"][-1], max(len(item["prompt_ids"]) for item in items)
    rows = [item["prompt_ids"] + [pad_id] * (width - len(item["prompt_ids"])) for item in items]
    mask = [[1] * len(item["prompt_ids"]) + [0] * (width - len(item["prompt_ids"])) for item in items]
    return torch.tensor(rows), torch.tensor(mask)


def test_B13_prompts_are_padded_on_the_left_with_the_padding_token():
    model = tiny_llama()
    items = [{"prompt_ids": ids, "row": row} for row, ids in enumerate([[1, 7, 9], [1, 8, 8, 8, 4, 6, 3]])]
    settings = SamplingSettings(max_new_tokens=6, eos_ids=(EOS,), pad_id=PAD, temperature=0.0)
    rollout = HFGenerateRollout(model, settings)

    def answer(ids, mask):
        return rollout.generate(ids, mask, torch.zeros(len(ids), 6))[0].tolist()

    alone = answer(torch.tensor([[1, 7, 9]]), torch.ones(1, 3, dtype=torch.long))
    batch = DataCollatorRLHF(PAD)(items, 2)
    assert batch["prompt_ids"][0].tolist() == [PAD] * 4 + [1, 7, 9] and batch["prompt_mask"][0].sum() == 3
    assert answer(batch["prompt_ids"], batch["prompt_mask"]) == alone
    ids, mask = old_right_padded(items)
    assert ids[0, -1] != PAD  # a real word of another record, between prompt and answer
    assert answer(ids, mask) != alone
