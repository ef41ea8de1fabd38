"""Round the loop: two models answer on the page, a visitor votes, step 2 learns from the votes, step 3 from step 2."""

import json

from alpaca_rlhf.inference import llama_chatbot_gradio as app
from alpaca_rlhf.inference.models import load_scorer
from alpaca_rlhf.runtime.run import start_run
from tests.inference.models import scripted
from tests.inference.test_page import Visitor
from tests.pipeline.steps import make_base, metrics, run_step

WORDS = "blue seven red green one two three the cat dog eats sleeps runs big small what is why do like apples".split()


def test_page_votes_step_2_step_3(tmp_path):
    """The visitor likes "yes" better than "no"; so does the reward model, on a question that nobody voted on."""
    folder, votes = make_base(tmp_path), tmp_path / "votes.jsonl"
    visitor = Visitor(app.Handlers([scripted("yes", name="a"), scripted("no", name="b")], None, votes), "s")
    for number, word in enumerate(WORDS):
        visitor.ask(f"do you like {word} ?", blind=True)
        judgement = "tie" if number % 7 == 6 else "left" if visitor.turns(0)[-1] == "yes" else "right"
        visitor.vote(judgement, "yes please" if number == 3 else "")
        visitor.take(visitor.handlers.clear("s"))
    lines = [json.loads(line) for line in votes.read_text().splitlines()]
    assert len(lines) == len(WORDS) and {line["left"] for line in lines} == {"yes", "no"}

    shared = {"data_path": votes, "model_name_or_path": folder / "base"}
    assert run_step(2, folder, **shared, data_split="0,1,0", output_dir=folder / "critic") == 0
    (read,) = json.loads((folder / "critic" / "training_arguments.json").read_text())["data_report"]["sets"]
    assert read["read"] == len(WORDS) and read["skipped"] == {"the vote is a tie": 3}

    scorer = load_scorer(str(folder / "critic"), start_run(seed=0, dtype="fp32"))
    yes, no = (scorer.score((), "do you like water ?", answer) for answer in ("yes", "no"))
    assert yes > no

    done = run_step(3, folder, actor_model_name_or_path=folder / "base", output_dir=folder / "final",
                    critic_model_name_or_path=folder / "critic", data_path=votes, data_split="0,0,1")  # fmt: skip
    assert done == 0 and metrics(folder / "final")[-1]
