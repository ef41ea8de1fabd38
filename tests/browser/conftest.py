"""The chat page in a real browser: one page, one browser, and visitors that each have a context of their own."""

import dataclasses
import itertools
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alpaca_rlhf.inference import llama_chatbot_gradio as app
from alpaca_rlhf.inference.settings import Settings
from tests.inference.models import chat_model
from tests.tiny import tiny_llama

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()  # fmt: skip
OFTEN = [" answers", "on and on ", "hello", "sft", "rlhf", " says ", "what did I say", "dog ", "cat ", "x" * 40,
         "What are some facts", " about tennis?", "window.hacked=1", "script"]  # fmt: skip
WAIT_MS = 60_000  # how long an expectation waits; nothing is measured


def find_browser():
    """The program to start; skips, with the reason, where there is none."""
    chosen = os.environ.get("ALPACA_RLHF_BROWSER")
    if chosen is not None:
        assert shutil.which(chosen), f"ALPACA_RLHF_BROWSER is {chosen!r}, which is no program"
        return shutil.which(chosen)
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH; install one (Debian: apt-get install "
                    "chromium) or name one in ALPACA_RLHF_BROWSER")  # fmt: skip
    return found


def byte_tokenizer():
    """One token for each byte, so that a scripted model can write anything; what it writes often goes faster."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.add_tokens(OFTEN)
    return tokenizer


class Actors:
    """Two models that answer by script: what they write, and how, depends on the question.

    ``hold: …`` stops after some tokens until ``gate`` opens; ``endless`` goes on until it is stopped; ``fail`` fails in
    the middle; ``quiet: …`` is answered with ok; ``count`` counts;
    ``what did I say`` repeats the questions of the prompt; ``say: …`` says that.
    """

    def __init__(self):
        self.gate = threading.Event()
        self.pause = threading.Event()  # is never set: to wait for it is to be slow
        self.counts = {name: itertools.count(1) for name in ("sft", "rlhf")}
        self.models = [self.model("sft"), self.model("rlhf")]

    def script(self, name, prompt):
        questions = [part.strip() for part in re.findall(r"Human: (.*?)\s*Assistant:", prompt, re.DOTALL)]
        question = questions[-1]
        if question.startswith("say: "):
            return question, question.removeprefix("say: ")
        if question.startswith("quiet: "):
            return question, "ok"
        answers = {
            "count": lambda: f"{name} says {next(self.counts[name])}",
            "what did I say": lambda: "; ".join(questions),
            "endless": lambda: "on and on " * 1000,
        }
        return question, answers.get(question, lambda: f"{name} answers {question}")()

    def before_token(self, question, written):
        if question.startswith("hold: ") and written == 2:
            assert self.gate.wait(60), "nobody opened the gate"
        if question == "endless":
            self.pause.wait(0.05)
        if question == "fail" and written == 2:
            raise RuntimeError("the kernel was lost")

    def model(self, name):
        tokenizer = byte_tokenizer()
        chat = chat_model(tiny_llama(len(tokenizer), positions=2048), tokenizer, name)
        forward, state = chat.model.forward, {}

        def written(*args, **kwargs):
            ids = kwargs["input_ids"]
            if ids.shape[1] > 1:  # the prompt: a new answer
                state["question"], text = self.script(name, tokenizer.decode(ids[0]))
                state["ids"] = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                state["written"] = 0
            self.before_token(state["question"], state["written"])
            output = forward(*args, **kwargs)
            output.logits = output.logits.new_full(output.logits.shape, -1e4)
            output.logits[:, -1, state["ids"][min(state["written"], len(state["ids"]) - 1)]] = 0.0
            state["written"] += 1
            return output

        chat.model.forward = written
        return dataclasses.replace(chat, step={"sft": "SFT", "rlhf": "RLHF"}[name], date="2024-02-29")


@dataclasses.dataclass
class Served:
    """The page that all tests of a module visit."""

    url: str
    votes: Path
    actors: Actors
    alone: str  # the address of the same page with the first model only


@pytest.fixture(scope="module")
def served(browser, tmp_path_factory):
    """The page with two models, and the one with one, served in this process."""
    actors, votes = Actors(), tmp_path_factory.mktemp("page") / "votes.jsonl"
    settings = Settings(max_new_tokens=1024)
    pages = [app.build(actors.models, settings, None, votes), app.build(actors.models[:1], settings, None, None)]
    urls = [app.opened(page, server_name="127.0.0.1")[1].rstrip("/") for page in pages]
    yield Served(urls[0], votes, actors, urls[1])
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def browser():
    """One real browser, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    program = find_browser()
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=WAIT_MS)
        browser = driver.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield browser
        browser.close()


class Visitor:
    """A person at the page, in a context of their own."""

    def __init__(self, page, errors, strangers):
        self.page, self.errors, self.strangers = page, errors, strangers
        self.message, self.status = page.locator("#message textarea"), page.locator("#status")

    def ask(self, text):
        self.message.fill(text)
        self.message.press("Enter")
        return self

    def click(self, name):
        self.page.locator(f"#{name}").click()
        return self

    def turns(self, role, side="left"):
        """The bubbles of ``user`` or ``bot``."""
        return self.page.locator(f"#chat_{side} [data-testid={role}]")

    def chat(self, side="left"):
        return self.page.locator(f"#chat_{side}")

    def note(self, side="left"):
        return self.page.locator(f"#note_{side}")


@pytest.fixture
def visit(browser, served):
    """Open the page as a new visitor. In the end no browser has complained, or asked another host for anything."""
    visitors = []

    def arrive(url=None, **context):
        errors, strangers = [], []
        context = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **context}
        place = browser.new_context(**context)
        place.set_default_timeout(WAIT_MS)
        place.route(lambda url: not url.startswith((served.url, served.alone, "data:", "blob:")),
                    lambda route: (strangers.append(route.request.url), route.abort()))  # fmt: skip
        page = place.new_page()
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url or served.url)
        visitors.append(Visitor(page, errors, strangers))
        visitors[-1].message.wait_for()
        return visitors[-1]

    yield arrive
    served.actors.gate.set()
    seen = [visitor.errors + visitor.strangers for visitor in visitors]
    for visitor in visitors:
        visitor.page.context.close()
    served.actors.gate.clear()
    assert not any(seen), seen
