"""The chat page: one model, or two side by side with blind votes.

    sh run_inference.sh 0 alpaca_rlhf/inference/llama_chatbot_gradio.py --path output/final/actor \\
        [--compare_path output/actor] [--reward_path output/critic]

It listens on this machine only, without a share link, and logs no conversation. Votes go to --votes, a file that step 2
reads as it is.
"""

import argparse
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference import page
from alpaca_rlhf.inference.models import (
    MEMORY_ADVICE,
    ChatModel,
    Scorer,
    add_model_arguments,
    load_chat_models,
    load_scorer,
)
from alpaca_rlhf.inference.settings import Settings, add_setting_arguments, settings_from
from alpaca_rlhf.inference.visitors import Handlers
from alpaca_rlhf.inference.votes import prepare_votes
from alpaca_rlhf.runtime.run import command, start_run

if TYPE_CHECKING:
    import gradio

EXAMPLES = (
    "What are some facts about tennis?",
    "How can I keep calm before an exam?",
    "Write a story of at most 100 words about a dog and the moon.",
    "Explain what a language model is to a child.",
)
# Of a conversation: as high on a wide screen; on a phone, where two stand one above the other, it grows.
LEAST_HEIGHT, MOST_HEIGHT = "clamp(110px, 32vw, 40vh)", "40vh"
REMEMBERED = 256  # sessions; gradio keeps some 60 KB for each and 75 more for each of its questions
VISITORS = 64  # whose questions may wait at the same time; those of further ones wait in gradio's queue
VOTE_BUTTONS = {"left": "Left is better", "right": "Right is better", "tie": "Tie", "both_bad": "Both are bad"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help. Raises UserError for one that would do nothing."""
    parser = argparse.ArgumentParser(prog="llama_chatbot_gradio", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_model_arguments(parser)
    parser.add_argument("--reward_path", metavar="DIR", help="a reward model whose score is shown beside each answer")
    parser.add_argument("--votes", metavar="FILE", help="where votes are added, with --compare_path (votes.jsonl)")
    server = parser.add_argument_group("server")
    server.add_argument("--server_name", default="127.0.0.1", metavar="HOST",
                        help="address to listen on (default 127.0.0.1: this machine only)")  # fmt: skip
    server.add_argument("--server_port", type=int, metavar="N", help="port (default: the first free one from 7860)")
    server.add_argument("--share", action="store_true", help="make a public link through gradio's servers")
    server.add_argument("--auth", metavar="USER:ENV_VAR",
                        help="ask for this user and the password that is in this environment variable")  # fmt: skip
    add_setting_arguments(parser)
    args = parser.parse_args(argv)
    if args.votes is not None and args.compare_path is None:
        raise UserError("--votes keeps judgements of two models; give the second one with --compare_path")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Load the models, build the page, serve until it is interrupted."""
    args = parse(argv)
    if importlib.util.find_spec("gradio") is None:
        raise UserError("the chat page needs the package gradio; install it with: pip install gradio")
    credentials = password(args.auth)
    votes = None if args.compare_path is None else Path(args.votes or "votes.jsonl")
    if votes is not None:
        prepare_votes(votes)
    run = start_run(seed=args.seed or 0, dtype=args.dtype)
    models = load_chat_models(args, run)
    settings = settings_from(args, min(model.limit for model in models))
    scorer = None if args.reward_path is None else load_scorer(args.reward_path, run)
    serve(build(models, settings, scorer, votes), args, credentials)


def password(auth: str | None) -> tuple[str, str] | None:
    """User and password of ``--auth``. Raises UserError: no such variable, or not spelt like USER:ENV_VAR."""
    if auth is None:
        return None
    user, _, variable = auth.partition(":")
    if not user or not variable:
        raise UserError(f"--auth {auth} is not USER:ENV_VAR; give a user and the name of an environment variable")
    if not os.environ.get(variable):
        raise UserError(f"--auth takes the password from the variable {variable}, which is not set; set it")
    return user, os.environ[variable]


def serve(blocks: "gradio.Blocks", args: argparse.Namespace, credentials: tuple[str, str] | None) -> None:
    """Listen until Ctrl-C. Raises UserError: the address or the port cannot be had."""
    try:
        _, url, public = opened(blocks, server_name=args.server_name, server_port=args.server_port, share=args.share,
                                auth=credentials)  # fmt: skip
    except OSError as error:
        place = f"{args.server_name}:{args.server_port or 'any port from 7860'}"
        raise UserError(f"the page cannot listen on {place} ({error}); choose another --server_port") from error
    print(f"the page is at {url}" + (f" and, for everybody, at {public}" if public else ""), flush=True)
    blocks.block_thread()


def opened(blocks: "gradio.Blocks", **place: Any) -> tuple[Any, str, str | None]:
    """Start to listen, without waiting; gives the application, its address and its public link."""
    import gradio

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # none from elsewhere
    return blocks.queue().launch(
        theme=gradio.themes.Default(**fonts), footer_links=[], ssr_mode=False, quiet=True, prevent_thread_lock=True,
        max_threads=2 * VISITORS, state_session_capacity=REMEMBERED, **place,
    )  # fmt: skip


def build(models: Sequence[ChatModel], settings: Settings, scorer: Scorer | None, votes: Path | None
          ) -> "gradio.Blocks":  # fmt: skip
    """The page for these models; with two of them there are two columns, and votes are kept."""
    import gradio as gr

    handlers = Handlers(models, scorer, votes)
    two = len(models) > 1
    title = ("Compare " if two else "Talk with ") + " and ".join(model.name for model in models)
    seen = page.view(handlers.fresh(), models)
    with gr.Blocks(title=title, analytics_enabled=False) as blocks:
        visit = gr.State(handlers.fresh())
        heading, words = page.as_written(title), page.as_written(introduction(scorer, votes))
        gr.Markdown(f"# {heading}\n\n{words}", latex_delimiters=[])
        with gr.Row(equal_height=True):
            chats = [chat(side, seen.labels[i], seen.notes[i]) for i, side in enumerate(page.SIDES[: len(models)])]
        status = gr.Markdown(page.as_written(seen.status), elem_id="status", container=True, latex_delimiters=[])
        with gr.Row(equal_height=True):
            message = gr.Textbox(label="Your message (Enter sends, Shift+Enter starts a new line)", lines=1,
                                 max_lines=10, autofocus=True, scale=6, min_width=260, elem_id="message")  # fmt: skip
            send = gr.Button("Send", variant="primary", min_width=120, elem_id="send")
            stop = gr.Button("Stop", variant="stop", min_width=120, elem_id="stop", visible=False)
        ballot = vote_row() if two else []
        with gr.Row(equal_height=True):
            blind = gr.Checkbox(False, label="Hide the names until I have voted", visible=two, elem_id="blind",
                                min_width=300, scale=2)  # fmt: skip
            again, undo, clear = (
                gr.Button(name.capitalize(), size="md", min_width=80, elem_id=name, interactive=name == "clear")
                for name in ("retry", "undo", "clear")
            )
        gr.Examples([[example] for example in EXAMPLES], message, label="Examples (one click fills the message)")
        with gr.Accordion("Settings", open=False):
            fields, values = dataclasses.fields(Settings), []
            for row in (fields[:3], fields[3:]):
                with gr.Row():
                    for field in row:
                        with gr.Column(min_width=260):
                            values.append(setting(field, getattr(settings, field.name), models))
        boxes, notes = zip(*chats, strict=True)
        outputs = [visit, message, status, *boxes, *notes, send, stop, again, undo, *ballot]
        events = {"ask": [message.submit, send.click], "retry": [again.click], "stop": [stop.click],
                  "clear": [clear.click, *(box.clear for box in boxes)], "undo": [undo.click]}  # fmt: skip
        connect(blocks, handlers, events, [visit, message, blind, *values], outputs)
        if two:
            connect_votes(handlers, visit, ballot, outputs)
    return blocks


def introduction(scorer: Scorer | None, votes: Path | None) -> str:
    """What one can do here, in a few words."""
    words = "Ask a question; the answer follows the whole conversation."
    if votes is not None:
        words = f"Both models answer your question. Vote for the better answer: {votes.name} can train a reward model."
    return words + (" Reward scores: higher is better." if scorer is not None else "")


def chat(side: str, label: str, note: str) -> tuple["gradio.Chatbot", "gradio.Markdown"]:
    """The conversation with one model and a note below it. What people type is no LaTeX, so nothing is."""
    import gradio as gr

    with gr.Column(min_width=300):
        box = gr.Chatbot(label=label, elem_id=f"chat_{side}", height=None, min_height=LEAST_HEIGHT,
                         max_height=MOST_HEIGHT, buttons=[], layout="bubble", allow_tags=False,
                         group_consecutive_messages=False, latex_delimiters=[],
                         placeholder="Answers appear here.")  # fmt: skip
        shown = gr.Markdown(note, elem_id=f"note_{side}", latex_delimiters=[])
    return box, shown


def setting(field: dataclasses.Field, value: Any, models: Sequence[ChatModel]) -> "gradio.components.Component":
    """The component of one setting."""
    import gradio as gr

    label, about = field.name.replace("_", " "), field.metadata["help"]
    sliders = {
        "max_new_tokens": (1, max(value, min(1024, min(model.limit for model in models) - 1)), 1),
        "num_beams": (1, max(value, 4), 1),
        "temperature": (0, max(value, 2), 0.05),
        "top_p": (0, 1, 0.05),
    }
    if field.name in sliders:
        low, high, step = sliders[field.name]
        return gr.Slider(low, high, value, step=step, label=label, info=about)
    if isinstance(value, bool):
        return gr.Checkbox(value, label=label, info=about)
    return gr.Number(value, label=label, info=about, precision=0)


def vote_row() -> list[Any]:
    """The buttons of a vote, which work when there is something to judge, and the visitor's own answer."""
    import gradio as gr

    with gr.Row():
        buttons = [
            gr.Button(text, min_width=120, size="md", elem_id=f"vote_{judgement}", interactive=False)
            for judgement, text in VOTE_BUTTONS.items()
        ]
    with gr.Accordion("I know a better answer", open=False):
        own = gr.Textbox("", label="Your own answer (it counts with the vote that you click then)", lines=2,
                         max_lines=8, elem_id="own")  # fmt: skip
    return [*buttons, own]


def connect_votes(handlers: Handlers, visit: Any, ballot: list[Any], outputs: list[Any]) -> None:
    """Join the buttons of a vote and the handler."""
    *buttons, own = ballot
    for judgement, button in zip(VOTE_BUTTONS, buttons, strict=True):

        def cast(visit: page.Visit, own: str, judgement: str = judgement) -> tuple:
            return updates(handlers.vote(visit, judgement, own))

        button.click(cast, [visit, own], outputs, api_name=f"vote_{judgement}", show_progress="hidden")


def connect(blocks: "gradio.Blocks", handlers: Handlers, events: dict[str, list[Any]], inputs: list[Any],
            outputs: list[Any]) -> None:  # fmt: skip
    """Join the events and the handlers. Questions of many visitors may wait at once, each in a thread of its own."""
    import gradio as gr

    def ask(request: gr.Request, *values: Any) -> Iterator[tuple]:
        yield from map(updates, handlers.ask(request.session_hash, *values))

    def retry(request: gr.Request, *values: Any) -> Iterator[tuple]:
        yield from map(updates, handlers.retry(request.session_hash, *values))

    def stop(request: gr.Request) -> None:
        handlers.stop(request.session_hash)

    def clear(request: gr.Request) -> tuple:
        return updates(handlers.clear(request.session_hash))

    def undo(request: gr.Request, *values: Any) -> tuple:
        return updates(handlers.undo(request.session_hash, *values))

    def leave(request: gr.Request) -> None:
        handlers.leave(request.session_hash)

    # The handlers know when a question may follow, and earlier than gradio's browser side would let it.
    many = {"concurrency_limit": VISITORS, "concurrency_id": "answers", "show_progress": "hidden",
            "trigger_mode": "multiple"}  # fmt: skip
    gr.on(events["ask"], ask, inputs, outputs, api_name="ask", **many)
    gr.on(events["retry"], retry, inputs, outputs, api_name="retry", **many)
    at_once = {"queue": False, "show_progress": "hidden"}
    gr.on(events["stop"], stop, api_name="stop", **at_once)
    gr.on(events["clear"], clear, None, outputs, api_name="clear", **at_once)
    gr.on(events["undo"], undo, inputs[:2], outputs, api_name="undo", **at_once)
    blocks.unload(leave)


def updates(values: tuple) -> tuple:
    """The outputs as gradio takes them: a dict of properties becomes an update, a value alone goes as it is, faster."""
    import gradio as gr

    def update(properties: dict[str, Any]) -> Any:
        return properties["value"] if set(properties) == {"value"} else gr.update(**properties)

    return tuple(update(value) if isinstance(value, dict) else value for value in values)


if __name__ == "__main__":
    raise SystemExit(command(main, MEMORY_ADVICE)())
