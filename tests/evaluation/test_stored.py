"""Records that outlive a killed process, and never meet other settings."""

import math

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.evaluation.stored import StoredRecords


def test_a_half_written_line_is_cut_off_and_written_again(tmp_path):
    first = StoredRecords(tmp_path, "answers", {"seed": 1})
    first.add({0: {"text": "é\u2028<b>"}, 2: {"text": "two"}})
    with first.path.open("ab") as file:
        file.write(b'{"row": 1, "te')
    second = StoredRecords(tmp_path, "answers", {"seed": 1})
    assert second.rows == first.rows and second.missing(4) == [1, 3]
    second.add({1: {"text": "one"}, 3: {"text": "three"}})
    third = StoredRecords(tmp_path, "answers", {"seed": 1})
    assert [record["text"] for record in third.ordered(4)] == ["é\u2028<b>", "one", "two", "three"]


def test_other_settings_and_other_kinds_lie_elsewhere(tmp_path):
    StoredRecords(tmp_path, "answers", {"seed": 1}).add({0: {"text": "x"}})
    assert StoredRecords(tmp_path, "answers", {"seed": 2}).rows == {}
    assert StoredRecords(tmp_path, "kl", {"seed": 1}).rows == {}
    assert StoredRecords(tmp_path, "answers", {"seed": 1}).missing(1) == []


def test_what_is_no_number_or_finds_no_place_is_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        StoredRecords(tmp_path, "scores", {}).add({0: {"score": math.nan}})
    assert StoredRecords(tmp_path, "scores", {}).rows == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        StoredRecords(tmp_path / "file" / "folder", "scores", {}).add({0: {"score": 1.0}})
