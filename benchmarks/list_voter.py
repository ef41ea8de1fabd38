"""A visitor of the chat page who likes answers with a numbered list, and pairs that show whether others do too."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer, RolloutInTraining
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.evaluation.figures import has_list
from alpaca_rlhf.inference.llama_chatbot_gradio import Handlers
from alpaca_rlhf.inference.models import ChatModel


class Ballot(NamedTuple):
    """How the votes came about."""

    asked: int  # questions
    answers_with_list: tuple[int, int]  # of each model
    won: tuple[int, int]  # votes for each model
    longer: int  # votes for the answer that has more tokens
    mean_tokens: tuple[float, float]  # of the answers that were voted for, and of the other ones


def cast_votes(
    models: Sequence[ChatModel], questions: Sequence[str], votes: int, file: Path, *, seed: int, max_new_tokens: int
) -> Ballot:
    """Ask two models, names hidden, one question after the other; vote where one answer has a list and the other none.

    Each question opens a conversation and has a seed of its own: with one seed for all of them the same random number
    would choose how each answer begins. Raises UserError where the questions do not lead to so many votes.
    """
    handlers = Handlers(models, None, file)
    lists, won, longer, lengths = [0, 0], [0, 0], 0, [0, 0]
    for number, question in enumerate(questions):
        values = (max_new_tokens, 1, True, 1.0, 1.0, seed * len(questions) + number)
        *_, outputs = handlers.ask("visitor", handlers.fresh(), question, True, *values)
        visit = outputs[0]
        liked = [has_list(visit.shown(side).text) for side in (0, 1)]
        for side in (0, 1):
            lists[visit.order[side]] += liked[side]
        if liked[0] == liked[1]:
            continue
        better = int(liked[1])
        assert handlers.vote(visit, ("left", "right")[better], "")[0].vote, "the page did not take the vote"
        won[visit.order[better]] += 1
        tokens = [visit.shown(side).tokens for side in (better, 1 - better)]
        longer += tokens[0] > tokens[1]
        lengths = [total + length for total, length in zip(lengths, tokens, strict=True)]
        if sum(won) == votes:
            mean_tokens = (lengths[0] / votes, lengths[1] / votes)
            return Ballot(number + 1, (lists[0], lists[1]), (won[0], won[1]), longer, mean_tokens)
    raise UserError(
        f"{len(questions)} questions led to {sum(won)} votes of {votes}, with lists in {lists[0]} and {lists[1]} "
        "of the answers; take a model that writes lists now and then"
    )


class Candidate(NamedTuple):
    """An answer that was sampled, and its length."""

    text: str
    tokens: int


class ListPair(NamedTuple):
    """An answer with a list, one without, to the same prompt."""

    prompt: str
    chosen: Candidate
    rejected: Candidate

    def row(self) -> dict[str, str]:
        """rm-static's columns."""
        return {"prompt": self.prompt, "chosen": f" {self.chosen.text}", "rejected": f" {self.rejected.text}"}


def list_pairs(answers: dict[str, list[Candidate]], seed: int, shorter: bool = False) -> list[ListPair]:
    """At most one pair for each prompt, drawn from all its pairs; ``shorter``: from those whose list is the shorter."""
    draw, pairs = random.Random(seed), []
    for prompt, candidates in answers.items():
        found = [
            ListPair(prompt, chosen, rejected)
            for chosen in candidates if has_list(chosen.text)
            for rejected in candidates if not has_list(rejected.text)
            if not shorter or chosen.tokens < rejected.tokens
        ]  # fmt: skip
        if found:
            pairs.append(draw.choice(found))
    return pairs


@contextlib.contextmanager
def watched_lists(encoder: TextEncoder) -> Iterator[list[float]]:
    """The share of answers with a list in each rollout that step 3 samples meanwhile; nothing else is changed."""
    shares: list[float] = []

    class Watched(DeepSpeedPPOTrainer):
        def generate_experience(self, batches: Sequence[dict]) -> RolloutInTraining:
            rollout = super().generate_experience(batches)
            shares.append(list_share(rollout.experience, encoder))
            return rollout

    original, step3.DeepSpeedPPOTrainer = step3.DeepSpeedPPOTrainer, Watched
    try:
        yield shares
    finally:
        step3.DeepSpeedPPOTrainer = original


def list_share(experience: Experience, encoder: TextEncoder) -> float:
    """Of a rollout's answers."""
    rows = zip(experience.responses, experience.response_mask, strict=True)
    found = [has_list(encoder.decode(ids[mask.bool()].tolist())) for ids, mask in rows]
    return sum(found) / len(found)
