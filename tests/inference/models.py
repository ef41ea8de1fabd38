"""Tiny chat models for the tests of inference: made in memory, or with an answer that is written beforehand."""

import torch

from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.inference.conversation import turn_ends
from alpaca_rlhf.inference.models import ChatModel, position_limit
from tests.tiny import tiny_llama, word_tokenizer


def chat_model(model=None, tokenizer=None, name="tiny", template="auto", limit=None):
    """A ChatModel around a tiny model."""
    tokenizer = tokenizer or word_tokenizer()
    model = model or tiny_llama(len(tokenizer))
    encoder = TextEncoder(tokenizer, template)
    return ChatModel(name, "", "", model, encoder, limit or position_limit(model), turn_ends(encoder))


def scripted(text, name="scripted", after=None, tokenizer=None, template="auto"):
    """A model that writes ``text`` (words of the tokenizer) and then its EOS, whatever it is asked.

    ``after``: (number of tokens, function): the function is called in the forward that follows so many tokens.
    """
    chat = chat_model(tokenizer=tokenizer, name=name, template=template)
    model, tokenizer = chat.model, chat.encoder.tokenizer
    script = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    calls = {"tokens": 0}
    forward = model.forward

    def written(*args, **kwargs):
        output = forward(*args, **kwargs)
        if kwargs["input_ids"].shape[1] > 1:  # the prompt: a new answer
            calls["tokens"] = 0
        if after is not None and calls["tokens"] == after[0]:
            after[1]()
        output.logits = torch.full_like(output.logits, -1e4)
        output.logits[:, -1, script[min(calls["tokens"], len(script) - 1)]] = 0.0
        calls["tokens"] += 1
        return output

    model.forward = written
    return chat
