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
import threading
from collections.abc import Callable, Iterator, Sequence
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
    import gradio

    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # none from elsewhere
    try:
        _, url, public = blocks.queue(default_concurrency_limit=8).launch(
            server_name=args.server_name, server_port=args.server_port, share=args.share, auth=credentials,
            theme=gradio.themes.Default(**fonts), footer_links=[], ssr_mode=False, quiet=True, prevent_thread_lock=True,
        )  # fmt: skip
    except OSError as error:
        place = f"{args.server_name}:{args.server_port or 'any port from 7860'}"
        raise UserError(f"the page cannot listen on {place} ({error}); choose another --server_port") from error
    print(f"the page is at {url}" + (f" and, for everybody, at {public}" if public else ""), flush=True)
    blocks.block_thread()


class Handlers:
    """What the page's events call. Only what belongs to no visitor is kept here, and which answers can be stopped.

    Outputs are the visitor's state, the text box, the status, then each side's chat; a dict holds changed properties,
    and an empty one leaves a component as it is.
    """

    def __init__(self, models: Sequence[ChatModel], scorer: Scorer | None, votes: Path | None) -> None:
        self.models = models
        self.scorer = scorer
        self.votes = votes
        self.stops: dict[str, threading.Event] = {}  # of the answers that grow now, by session

    def ask(self, session: str, visit: page.Visit, message: str, blind: bool, *values: Any) -> Iterator[tuple]:
        """Grow the answers to a message; once it is taken the text box is empty, and the visitor's again."""

        def start(stop: threading.Event) -> Iterator[page.Visit]:
            return page.ask(self.models, visit, message, settings_of(values), blind, stop, self.scorer)

        return self._grow(session, visit, start, {"value": ""})

    def retry(self, session: str, visit: page.Visit, _message: str, blind: bool, *values: Any) -> Iterator[tuple]:
        """Grow other answers to the last question."""

        def start(stop: threading.Event) -> Iterator[page.Visit]:
            return page.try_again(self.models, visit, settings_of(values), blind, stop, self.scorer)

        return self._grow(session, visit, start, {})

    def stop(self, session: str) -> None:
        """End the answers that grow for this visitor, and nobody else's; what is there of them stays."""
        if session in self.stops:
            self.stops[session].set()

    def clear(self, session: str) -> tuple:
        """Forget the conversation and whatever grows for it."""
        self._abandon(session)
        return self.shown(self.fresh(), {})

    def undo(self, session: str, visit: page.Visit, message: str) -> tuple:
        """Take the last round back; its question returns to an empty text box."""
        self._abandon(session)
        question = visit.question or (visit.history[-2].text if visit.history else "")
        try:
            return self.shown(page.undo(visit), {} if message.strip() else {"value": question})
        except UserError as error:
            return self.shown(visit, {}, str(error))

    def vote(self, visit: page.Visit, judgement: str, own: str) -> tuple:
        """Keep a vote; then the names are shown. The last output is the visitor's own answer."""
        assert self.votes is not None, "there are vote buttons without a second model"
        try:
            return *self.shown(page.vote(visit, self.models, judgement, own, self.votes), {}), {"value": ""}
        except UserError as error:
            return *self.shown(visit, {}, str(error)), {}

    def fresh(self) -> page.Visit:
        """A visit that has not begun."""
        return page.Visit(order=tuple(range(len(self.models))))

    def shown(self, visit: page.Visit, message: dict[str, str], error: str = "") -> tuple:
        """The outputs for a visit; ``error`` comes before what else there is to say."""
        seen = page.view(visit, self.models)
        sides = [{"value": value, "label": label} for value, label in zip(seen.messages, seen.labels, strict=True)]
        status = "\n".join(filter(None, [error and f"error: {error}", seen.status]))
        return visit, message, {"value": status}, *sides

    def _grow(self, session: str, visit: page.Visit, start: Callable[[threading.Event], Iterator[page.Visit]],
              message: dict[str, str]) -> Iterator[tuple]:  # fmt: skip
        stop = self.stops[session] = threading.Event()
        try:
            for growing in start(stop):
                if self.stops.get(session) is not stop:
                    return  # the visitor has cleared the conversation meanwhile
                yield self.shown(growing, message)
                message = {}
        except UserError as error:
            yield self.shown(visit, {}, str(error))
        finally:
            if self.stops.get(session) is stop:
                del self.stops[session]

    def _abandon(self, session: str) -> None:
        self.stop(session)
        self.stops.pop(session, None)


def settings_of(values: Sequence[Any]) -> Settings:
    """Settings from the components' values, in the order of the fields. Raises UserError, also for an emptied field."""
    fields = dataclasses.fields(Settings)
    texts = ["" if value is None else str(value) for value in values]
    settings = Settings()
    for field, text in zip(fields, texts, strict=True):
        whole = type(field.default) is int and text.endswith(".0")  # a number field gives 64.0
        settings = settings.changed(field.name, text.removesuffix(".0") if whole else text)
    return settings


def build(models: Sequence[ChatModel], settings: Settings, scorer: Scorer | None, votes: Path | None
          ) -> "gradio.Blocks":  # fmt: skip
    """The page for these models; with two of them there are two columns, and votes are kept."""
    import gradio as gr

    handlers = Handlers(models, scorer, votes)
    title = " and ".join(model.name for model in models)
    with gr.Blocks(title=title, analytics_enabled=False, fill_height=True) as blocks:
        visit = gr.State(handlers.fresh())
        gr.Markdown("# Talk with " + page.as_written(title))
        with gr.Row(equal_height=True):
            chats = [
                gr.Chatbot(label=model.label, elem_id=f"chat_{side}", min_width=300, height="55vh", buttons=[],
                           layout="bubble", allow_tags=False, group_consecutive_messages=False)  # fmt: skip
                for side, model in zip(page.SIDES, models, strict=False)
            ]
        status = gr.Textbox(label="About these answers", lines=2, max_lines=6, interactive=False, elem_id="status")
        blind = gr.Checkbox(False, label="Hide the names until I have voted", visible=len(models) > 1, elem_id="blind")
        message = gr.Textbox(render=False, label="Your message", lines=1, max_lines=10, autofocus=True,
                             elem_id="message")  # fmt: skip
        outputs = [visit, message, status, *chats]
        if len(models) > 1:
            vote_row(handlers, visit, outputs)
        message.render()
        with gr.Row():
            buttons = {
                name: gr.Button(name.capitalize(), min_width=80, elem_id=name,
                                variant={"send": "primary", "stop": "stop"}.get(name, "secondary"))
                for name in ("send", "stop", "retry", "undo", "clear")
            }  # fmt: skip
        gr.Examples([[example] for example in EXAMPLES], message, label="Examples")
        with gr.Accordion("Settings", open=False):
            values = [setting(field, getattr(settings, field.name), models) for field in dataclasses.fields(Settings)]
        connect(handlers, buttons, visit, message, [blind, *values], outputs)
    return blocks


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


def vote_row(handlers: Handlers, visit: Any, outputs: list[Any]) -> None:
    """The buttons of a vote, and the field for an answer of the visitor's own."""
    import gradio as gr

    own = gr.Textbox(label="A better answer of your own (optional, counts with any vote)", lines=1, max_lines=8,
                     elem_id="own")  # fmt: skip
    with gr.Row():
        for judgement, text in VOTE_BUTTONS.items():
            button = gr.Button(text, min_width=120, size="sm", elem_id=f"vote_{judgement}")

            def cast(visit: page.Visit, own: str, judgement: str = judgement) -> tuple:
                return updates(handlers.vote(visit, judgement, own))

            button.click(cast, [visit, own], [*outputs, own], api_name=f"vote_{judgement}")


def connect(handlers: Handlers, buttons: dict[str, Any], visit: Any, message: Any, settings: list[Any],
            outputs: list[Any]) -> None:  # fmt: skip
    """Join the components and the handlers. One question is answered at a time; the others wait in the queue."""
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

    inputs = [visit, message, *settings]
    one_by_one = {"concurrency_limit": 1, "concurrency_id": "answers", "show_progress": "minimal"}
    growing = [
        gr.on([buttons["send"].click, message.submit], ask, inputs, outputs, api_name="ask", **one_by_one),
        buttons["retry"].click(retry, inputs, outputs, api_name="retry", **one_by_one),
    ]
    buttons["stop"].click(stop, api_name="stop", queue=False)
    buttons["clear"].click(clear, None, outputs, cancels=growing, api_name="clear")
    buttons["undo"].click(undo, [visit, message], outputs, cancels=growing, api_name="undo")


def updates(values: tuple) -> tuple:
    """The outputs as gradio takes them: a dict of properties becomes an update."""
    import gradio as gr

    return tuple(gr.update(**value) if isinstance(value, dict) else value for value in values)


if __name__ == "__main__":
    raise SystemExit(command(main, MEMORY_ADVICE)())
