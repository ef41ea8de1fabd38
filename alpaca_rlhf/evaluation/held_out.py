"""The records of a data set that no step has trained on."""

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import split_rows
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, RawDataset


def held_out(raw: RawDataset, data_seed: int, otherwise: str) -> tuple[list[Conversation], str]:
    """The test part, else what the steps with that --data_seed hold out; and what it is, in words.

    Raises:
        UserError: neither exists; ``otherwise`` says what to do then.
    """
    if raw.test is not None:
        return raw.test, f"the test part of {raw.name}"
    _, rows = split_rows(len(raw.train), (1, 1, 1), 1, data_seed, hold_out=True)
    if not rows:
        raise UserError(f"{raw.name} has no test part and too few records to hold some out; {otherwise}")
    return [raw.train[row] for row in rows], f"the records held out of {raw.name}"
