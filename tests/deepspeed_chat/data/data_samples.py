"""Records of known lengths, and the part of a Run that data needs."""



from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import (
    create_dataset_split,
    create_prompt_dataset,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn
from tests.tiny import PAIRS

NUMBERS = "one two three blue seven red green cat dog".split()
U, A, S = (lambda text, role=role: Turn(role, text) for role in ("user", "assistant", "system"))


class OneProcess:
    """The part of a Run that data needs."""

    rank, world_size, is_main = 0, 1, True

    def write_once(self, done, write):
        if not done():
            write()
        assert done()


def words(count: int) -> str:
    return " ".join(["cat"] * count)


def talk(prompt: int, answer: int = 1, rejected: int | None = None) -> Conversation:
    """A record of exactly ``prompt`` prompt tokens: BOS, 'Human', ':', the words, 'Assistant', ':'."""
    other = None if rejected is None else "dog " + words(rejected - 1)
    return Conversation("f:1", (U(words(prompt - 5)),), words(answer), other)


def pairs(count: int) -> list[dict]:
    """Distinct preference rows."""
    return [
        {**PAIRS[i % 8], "prompt": f"Human: {NUMBERS[i % 9]} {NUMBERS[i // 9 % 9]} {words(i // 81)} Assistant:"}
        for i in range(count)
    ]


def make(path, step, encoder, tmp_path, **options):
    options = {
        "split": (2, 4, 4), "seed": 1234, "cache_dir": str(tmp_path / "cache"), "max_len": 64, "run": OneProcess(),
        **options,
    }  # fmt: skip
    return create_prompt_dataset(
        paths=[str(path)] if not isinstance(path, list) else list(map(str, path)), step=step, encoder=encoder, **options
    )


def only(conversation, step, encoder, max_len):
    (encoded,) = create_dataset_split([conversation], step=step, encoder=encoder, max_len=max_len)
    return encoded


# ---- length rules
