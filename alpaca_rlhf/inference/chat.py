"""Talk with a model in the terminal, or with two that answer the same questions.

    python -m alpaca_rlhf.inference.chat --path output/final [--compare_path output/actor]

A line is a question. Lines that begin with / are commands: /help lists them. Ctrl-C stops an answer; Ctrl-D ends.
A pipe works as well: each of its lines is a question or a command, and its end is the end.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference.conversation import History, cleaned, with_round, without_last_round
from alpaca_rlhf.inference.generation import Answer, stream_answer
from alpaca_rlhf.inference.models import MEMORY_ADVICE, ChatModel, add_model_arguments, load_chat_models
from alpaca_rlhf.inference.settings import Settings, add_setting_arguments, settings_from
from alpaca_rlhf.runtime.run import command, start_run

Write = Callable[[str], object]

HELP = """\
/clear             forget the conversation
/undo              take the last question and its answer back
/set               show the settings
/set NAME VALUE    change one, for example /set temperature 0.7
/help              this list
/quit              leave (so does Ctrl-D)
A line that is to begin with a slash needs a blank before it.
"""


@dataclasses.dataclass(frozen=True)
class Talk:
    """The state of a conversation in the terminal."""

    settings: Settings
    history: History = ()
    over: bool = False


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(prog="chat", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_model_arguments(parser)
    add_setting_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Load, greet, talk until the end of the input."""
    args = parse(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no UTF-8 are refused in words, one line at a time
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    run = start_run(seed=args.seed or 0, dtype=args.dtype)
    models = load_chat_models(args, run)
    settings = settings_from(args, min(model.limit for model in models))

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write(greeting(models, settings))
    talk(models, Talk(settings), lines(sys.stdin.isatty()), write)


def lines(terminal: bool) -> Iterator[str]:
    """The lines of standard input until its end; with a prompt and editing where somebody types them."""
    if not terminal:
        yield from sys.stdin
        return
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives input() its editing and its history
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return


def greeting(models: Sequence[ChatModel], settings: Settings) -> str:
    """Which models these are, and what the settings leave without effect."""
    text = "".join(f"{model.label}, {model.limit} tokens in all\n" for model in models)
    if len(models) > 1:
        text += f"Both answer the same conversation, which goes on with the answer of {models[0].name}.\n"
    return text + "".join(f"note: {remark}\n" for remark in settings.remarks()) + "/help lists the commands.\n"


def talk(models: Sequence[ChatModel], state: Talk, questions: Iterable[str], write: Write) -> Talk:
    """Answer every line; a mistake or a failed answer is told and the next line is served."""
    for line in questions:
        line = line.rstrip("\n")
        if not line.strip():
            continue
        try:
            state = obey(line, state, write) if line.startswith("/") else ask(models, line, state, write)
        except UserError as error:
            write(f"error: {error}\n")
        if state.over:
            break
    return state


def obey(line: str, state: Talk, write: Write) -> Talk:
    """Carry out one command. Raises UserError for one that does not exist."""
    name, *words = line.split()
    if name == "/set" and len(words) in (0, 2):
        settings = state.settings.changed(*words) if words else state.settings
        for field in dataclasses.fields(settings) if not words else ():
            write(f"{field.name} {getattr(settings, field.name)}: {field.metadata['help']}\n")
        write("".join(f"note: {remark}\n" for remark in settings.remarks()))
        return dataclasses.replace(state, settings=settings)
    if name == "/set" or words or name not in ("/clear", "/undo", "/help", "/quit"):
        raise UserError(f"there is no command {line!r}; /help lists them")
    if name == "/help":
        write(HELP)
    if name == "/undo" and not state.history:
        raise UserError("there is nothing to take back; the conversation is empty")
    return {
        "/clear": dataclasses.replace(state, history=()),
        "/undo": dataclasses.replace(state, history=without_last_round(state.history)),
        "/help": state,
        "/quit": dataclasses.replace(state, over=True),
    }[name]


def ask(models: Sequence[ChatModel], line: str, state: Talk, write: Write) -> Talk:
    """Write the answer of each model as it grows; the conversation goes on with that of the first.

    An answer that failed is no part of the conversation, nor is its question.
    """
    message = cleaned(line)
    for model in models:  # all of them have to be able to read the question before one answers
        model.prompt(state.history, message, state.settings.max_new_tokens)
    answers = [show(model, message, state, write, named=len(models) > 1) for model in models]
    if answers[0].finish == "failed":
        return state
    return dataclasses.replace(state, history=with_round(state.history, message, answers[0].text))


def show(model: ChatModel, message: str, state: Talk, write: Write, named: bool) -> Answer:
    """Write one model's answer as it grows, then what there is to say about it; Ctrl-C stops it."""
    if named:
        write(f"[{model.name}] ")
    answer = Answer()
    stream = stream_answer(model, state.history, message, state.settings)
    try:
        for part in stream:
            write(part.text[len(answer.text) :])
            answer = part
    except KeyboardInterrupt:
        answer = dataclasses.replace(answer, finish="stopped")
    finally:
        stream.close()
    write("\n" + (f"error: {answer.error}\n" if answer.error else ""))
    remarks = "; ".join(answer.remarks())
    write(f"({remarks})\n" if remarks else "")
    return answer


if __name__ == "__main__":
    raise SystemExit(command(main, MEMORY_ADVICE)())
