"""What the words of a command line become, and the one sentence for each mistake in them."""

import pytest

from alpaca_rlhf.arguments.deepspeed_chat import parse_step1, parse_step2, parse_step3
from alpaca_rlhf.arguments.errors import UserError

ONE = ["--model_name_or_path", "m"]
THREE = ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]


def refusal(parse, words):
    with pytest.raises(UserError) as error:
        parse(words)
    sentence = str(error.value)
    assert "\n" not in sentence and "<" not in sentence and "{" not in sentence
    return sentence


def test_value_behind_a_blank_or_an_equals_sign():
    for words in (["--learning_rate", "3e-4"], ["--learning_rate=3e-4"]):
        assert parse_step1(ONE + words).model.learning_rate == 3e-4


def test_B08_module_names_with_blanks_and_a_trailing_comma():
    for words in (["q_proj,k_proj"], ["q_proj,", "k_proj"], ["q_proj", ",k_proj,"], [" q_proj , k_proj ,"]):
        parsed = parse_step1([*ONE, "--lora_dim", "8", "--lora_module_name", *words])
        assert parsed.model.lora_module_names == ("q_proj", "k_proj")


def test_D07_data_sets_with_blanks_and_commas_left_over():
    parsed = parse_step1([*ONE, "--data_path", "a.json,", " b.json", "--dataset_probs", "0.5,", "0.5"])
    assert parsed.data.paths == ("a.json", "b.json")
    assert parsed.data.probs == (0.5, 0.5)


def test_D07_one_probability_for_two_data_sets_is_refused():
    sentence = refusal(parse_step1, [*ONE, "--data_path", "a", "b", "--dataset_probs", "0.5"])
    assert sentence == "--dataset_probs holds 1 and --data_path holds 2; give one probability for each data set"


def test_data_split_as_written_in_the_seeds_and_with_blanks():
    for words in (["6,2,2"], ["6,", "2,", "2"], ["6", "2", "2"]):
        assert parse_step1([*ONE, "--data_split", *words]).data.split == (6, 2, 2)


def test_home_folder_is_expanded_where_the_shell_does_not(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    assert parse_step1(["--model_name_or_path=~/m"]).model.path == "/home/of/me/m"


def test_P18_zero_on_the_command_line_is_a_value():
    words = "--kl_coef 0 --top_k 0 --actor_learning_rate 0 --critic_dropout 0 --missing_eos_penalty 0 --gamma 0"
    parsed = parse_step3(THREE + words.split())
    assert parsed.ppo.kl_coef == 0 and parsed.ppo.gamma == 0
    assert parsed.ppo.missing_eos_penalty == 0
    assert parsed.actor.learning_rate == 0
    assert parsed.critic.dropout == 0 and parsed.actor.dropout is None


WRONG = [
    ("", "--model_name_or_path must be given; --help tells what for"),
    ("M --lora_dims 8", "unknown option --lora_dims; did you mean --lora_dim?"),
    ("M --learning-rate=1", "unknown option --learning-rate; did you mean --learning_rate?"),
    ("M --learn 1", "unknown option --learn; --help lists them all"),
    ("M -lora_dim 8", "unknown option -lora_dim; did you mean --lora_dim?"),
    ("M extra", "'extra' belongs to no option; options start with two dashes, see --help"),
    ("M --lora_dim", "--lora_dim needs a value; one that starts with a dash is written --lora_dim=-VALUE"),
    ("M --lora_dim 8.5", "--lora_dim is '8.5'; it must be a whole number"),
    ("M --learning_rate fast", "--learning_rate is 'fast'; it must be a number"),
    ("M --learning_rate nan", "--learning_rate is nan; it must be a finite number"),
    ("M --learning_rate=-1e-3", "--learning_rate is -0.001; it must be at least 0"),
    ("M --data_split 2,x,4", "--data_split is '2,x,4'; it must be numbers with commas between"),
    ("M --deepspeed=true", "--deepspeed takes no value; leave what follows it away"),
    ("M --dtype fp8", "--dtype is 'fp8'; choose one of auto, fp32, bf16, fp16"),
    ("M --dropout 1", "--dropout is 1; it must be at least 0 and below 1"),
    ("M --seed 1 --seed 2", "--seed is given twice with different values, 1 and 2; keep one"),
    (
        "M --dropout 0.1 --disable_dropout",
        "--dropout and --disable_dropout set the same thing to different values, 0.1 and 0; keep one of them",
    ),
    (
        "M --zero_stage 2",
        "--zero_stage is 2, but ZeRO is a part of DeepSpeed and --deepspeed is not given; add --deepspeed, or leave "
        "--zero_stage away",
    ),
    (
        "M --only_optimize_lora",
        "--only_optimize_lora trains adapters only, but --lora_dim is 0, which means no adapters; give --lora_dim a "
        "rank such as 8, or leave --only_optimize_lora away",
    ),
    (
        "M --lora_module_name q_proj",
        "--lora_module_name q_proj has no effect without --lora_dim; set --lora_dim too, or leave --lora_module_name "
        "away",
    ),
    (
        "M --deepspeed --offload",
        "--offload has no effect without --zero_stage; set --zero_stage too, or leave --offload away",
    ),
    (
        "M --lora_dim 2 --lora_module_name ,",
        "--lora_module_name is ','; it must be names with commas between, such as q_proj,k_proj",
    ),
    ("--model_name_or_path=", "--model_name_or_path holds an empty word; give a value or leave the option away"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_one_sentence_for_each_mistake(words, sentence):
    assert refusal(parse_step1, words.replace("M", "--model_name_or_path m").split()) == sentence


def test_a_setting_is_called_by_the_spelling_that_was_typed():
    assert refusal(parse_step3, [*THREE, "--eps_clip", "0"]) == "--eps_clip is 0; it must be above 0"
    assert refusal(parse_step3, [*THREE, "--clip_ratio", "0"]) == "--clip_ratio is 0; it must be above 0"


def test_P24_two_spellings_with_two_values_are_refused_and_with_one_value_are_fine():
    sentence = refusal(parse_step3, [*THREE, "--kl_coef", "0.1", "--init_kl_coef", "0.2"])
    assert sentence.startswith("--kl_coef and --init_kl_coef set the same thing to different values, 0.1 and 0.2")
    parsed = parse_step3([*THREE, "--kl_coef", "0.1", "--init_kl_coef", "0.10"])
    assert parsed.ppo.kl_coef == 0.1


def test_both_models_need_adapters_when_only_adapters_are_trained():
    sentence = refusal(parse_step3, [*THREE, "--only_optimize_lora", "--actor_lora_dim", "8"])
    assert "--only_optimize_lora" in sentence and "--critic_lora_dim is 0" in sentence
    sentence = refusal(parse_step3, [*THREE, "--only_optimize_lora", "--critic_lora_dim", "8"])
    assert "--actor_lora_dim is 0" in sentence


def test_a_default_typed_without_its_companion_is_refused_too():
    assert "--kl_horizon 10000 has no effect" in refusal(parse_step3, [*THREE, "--kl_horizon", "10000"])
    assert "--tensorboard_path here has no effect" in refusal(parse_step1, [*ONE, "--tensorboard_path", "here"])
    assert "--unsup_coef 0 has no effect" in refusal(parse_step3, [*THREE, "--unsup_coef", "0"])


def test_temperature_0_is_refused_with_the_reason():
    sentence = refusal(parse_step3, [*THREE, "--temperature", "0"])
    assert sentence.startswith("--temperature is 0, which is greedy decoding")


@pytest.mark.parametrize("parse", [parse_step1, parse_step2, parse_step3])
def test_help_prints_and_exits_with_0_whatever_else_is_typed(parse, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(["--help"])
    assert leaving.value.code == 0
    assert "--data_path" in capsys.readouterr().out


def test_the_programs_own_words_are_the_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["main.py", "--model_name_or_path", "from-argv"])
    assert parse_step1().model.path == "from-argv"
    assert parse_step1(None).model.path == "from-argv"
