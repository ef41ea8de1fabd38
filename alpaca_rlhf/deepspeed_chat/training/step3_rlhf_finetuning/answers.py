"""What the policy says at present, for the person who watches."""

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.runtime.run import Run


def print_answers(run: Run, encoder: TextEncoder, experience: Experience, count: int = 2) -> None:
    """A few answers of the rollout just made, with their scores."""
    for row in range(min(count, len(experience))):
        prompt = experience.sequences[row, : experience.prompt_length]
        prompt = prompt[experience.attention_mask[row, : experience.prompt_length].bool()].tolist()
        answer = experience.responses[row][experience.response_mask[row].bool()].tolist()
        score = float(experience.scores[row])
        run.print(f"--- score {score:.3f}\n{encoder.decode(prompt)}\n>>> {encoder.decode(answer)}")
