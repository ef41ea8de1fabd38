"""Settings: what is refused, what is said to do nothing, and how a person spells them."""

import argparse

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference.settings import Settings, add_setting_arguments, settings_from


@pytest.mark.parametrize(
    "changes, named",
    [
        ({}, []),
        ({"temperature": 1e-4}, []),
        ({"top_p": 1.0}, []),
        ({"temperature": 0.0}, ["top_p", "seed"]),
        ({"do_sample": False}, ["temperature", "top_p", "seed"]),
        ({"top_p": 0.0}, ["temperature", "seed"]),
        ({"num_beams": 2, "temperature": 0.0}, ["do_sample", "temperature", "top_p", "seed"]),
    ],
)
def test_U08_what_does_nothing_is_said(changes, named):
    remarks = Settings(**changes).remarks()
    assert len(remarks) == bool(named)
    for remark in remarks:
        assert "do nothing" in remark and all(name in remark.split(":")[1] for name in named)


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("max_new_tokens", "0", "max_new_tokens is 0; it must be at least 1"),
        ("max_new_tokens", "1.5", "give a whole number"),
        ("temperature", "-0.1", "at least 0"),
        ("temperature", "nan", "finite"),
        ("top_p", "1.01", "at most 1"),
        ("num_beams", "0", "at least 1"),
        ("do_sample", "maybe", "on or off"),
        ("seed", "-1", "at least 0"),
        ("temperatur", "1", "there is no setting 'temperatur'; choose max_new_tokens"),
    ],
)
def test_U08_a_wrong_value_is_refused_in_words(name, text, sentence):
    with pytest.raises(UserError, match=sentence):
        Settings().changed(name, text)


def test_a_setting_as_a_person_spells_it():
    settings = Settings().changed("temperature", "0.5").changed("do_sample", "off").changed("max_new_tokens", "1")
    assert settings == Settings(max_new_tokens=1, do_sample=False, temperature=0.5)
    assert settings.changed("do_sample", "ON").do_sample is True


def test_the_command_line_and_the_default_that_fits_the_model():
    parser = argparse.ArgumentParser()
    add_setting_arguments(parser)
    assert settings_from(parser.parse_args([]), 1024) == Settings()
    assert settings_from(parser.parse_args([]), 64).max_new_tokens == 32
    given = parser.parse_args(["--no-do_sample", "--top_p", "1", "--max_new_tokens", "500"])
    assert settings_from(given, 64) == Settings(max_new_tokens=500, do_sample=False, top_p=1.0)
