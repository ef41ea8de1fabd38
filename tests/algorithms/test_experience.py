"""The record: rows selected, joined and trimmed without moving anything that counts."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from alpaca_rlhf.algorithms.experience import Experience

PAD = 0


def record(prompts, answers, prompt_width, response_width, first_row=0):
    """One row per prompt and answer length; every token and every number of a row is its own and not 0."""
    batch, width = len(prompts), prompt_width + response_width
    columns = torch.arange(width)
    starts, ends = prompt_width - torch.tensor(prompts)[:, None], prompt_width + torch.tensor(answers)[:, None]
    attention = ((columns >= starts) & (columns < ends)).long()
    rows = torch.arange(first_row, first_row + batch)[:, None]
    tokens = (100 * (rows + 1) + columns - prompt_width + 50) * attention
    mask = attention[:, prompt_width:]
    numbers = {
        name: (tokens[:, prompt_width:] + 1000.0 * k) * mask
        for k, name in enumerate(
            ("old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns"), start=1
        )
    }
    scores = rows[:, 0] + 0.5
    return Experience(tokens, attention, prompt_width, mask, **numbers, scores=scores, row_mask=torch.ones(batch))


def facts(experience):
    """What counts, row by row, free of widths and padding."""
    rows = []
    for b in range(len(experience)):
        here = experience.response_mask[b].bool()
        per_token = [getattr(experience, name)[b][here].tolist() for name in
                     ("old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns")]  # fmt: skip
        attended = experience.attention_mask[b].bool()
        prompt = experience.sequences[b, : experience.prompt_length][attended[: experience.prompt_length]].tolist()
        answer = experience.responses[b][here].tolist()
        padding = set(experience.sequences[b][~attended].tolist()) - {PAD}
        rows.append((prompt, answer, per_token, experience.scores[b].item(), experience.row_mask[b].item(), padding))
    return rows


def test_select_takes_rows_in_the_given_order():
    whole = record([3, 1, 2], [2, 4, 1], 3, 4)
    assert facts(whole.select(torch.tensor([2, 0]))) == [facts(whole)[2], facts(whole)[0]]
    assert len(whole.select(torch.tensor([1]))) == 1


def test_concat_pads_prompts_on_the_left_and_responses_on_the_right():
    narrow, wide = record([2, 1], [5, 3], 2, 5), record([6, 4, 1], [1, 2, 2], 6, 2, first_row=2)
    joined = Experience.concat([narrow, wide], pad_id=PAD)
    assert (joined.prompt_length, joined.response_length, len(joined)) == (6, 5, 5)
    assert facts(joined) == facts(narrow) + facts(wide)
    assert joined.attention_mask[:, 5].tolist() == [1] * 5  # the last prompt column is a real token in every row


def test_concat_uses_the_pad_id_and_refuses_an_empty_list():
    joined = Experience.concat([record([1], [1], 1, 1), record([2], [2], 2, 2)], pad_id=7)
    assert joined.sequences[0, 0] == 7 and joined.sequences[0, -1] == 7
    with pytest.raises(ValueError, match="at least one"):
        Experience.concat([], pad_id=PAD)


def test_must_fail_concat_with_both_sides_padded_on_the_right():
    narrow, wide = record([2], [3], 2, 3), record([4], [3], 4, 3, first_row=1)
    shifted = torch.nn.functional.pad(narrow.sequences, (0, 2))
    right = Experience.concat([narrow, wide], pad_id=PAD).sequences[:1]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(shifted, right)


def test_trim_cuts_exactly_the_columns_that_are_padding_everywhere():
    whole = record([3, 1], [2, 1], 6, 5)
    trimmed = whole.trim()
    assert (trimmed.prompt_length, trimmed.response_length) == (3, 2)
    assert facts(trimmed) == facts(whole)
    assert facts(trimmed.trim()) == facts(whole) and trimmed.trim().prompt_length == 3


def test_trim_after_select_narrows_to_the_rows_kept_and_undoes_concat():
    short, long = record([2], [1], 2, 1), record([7], [6], 7, 6, first_row=1)
    back = Experience.concat([short, long], pad_id=PAD).select(torch.tensor([0])).trim()
    assert facts(back) == facts(short)
    assert (back.prompt_length, back.response_length) == (2, 1)


def test_trim_keeps_one_column_of_each_part_when_every_row_is_a_filler():
    whole = record([1, 1], [3, 2], 4, 3)
    filler = replace(whole, response_mask=torch.zeros_like(whole.response_mask), row_mask=torch.zeros(2))
    nothing = replace(filler, attention_mask=torch.zeros_like(whole.attention_mask))
    for record_ in (filler.trim(), nothing.trim()):
        assert (record_.prompt_length, record_.response_length) == (1, 1)


def test_to_moves_every_tensor():
    moved = record([2], [2], 2, 2).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 11 and {tensor.device.type for tensor in tensors} == {"meta"}


def test_P09_responses_begin_at_the_prompt_length():
    whole = record([2, 1], [2, 2], 2, 2)
    assert whole.responses.tolist() == whole.sequences[:, 2:].tolist()


def test_a_graph_or_a_wrong_shape_is_an_internal_error_and_nothing_can_be_changed():
    whole = record([2], [2], 2, 2)
    with pytest.raises(AssertionError, match="values"):
        replace(whole, values=torch.zeros(1, 2, requires_grad=True))
    with pytest.raises(AssertionError, match="disagree"):
        replace(whole, rewards=torch.zeros(1, 3))
    with pytest.raises(AssertionError, match="disagree"):
        replace(whole, prompt_length=3)
    with pytest.raises(FrozenInstanceError):
        whole.scores = torch.zeros(1)
