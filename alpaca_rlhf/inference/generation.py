"""Answers as they grow: a worker thread generates, an iterator reads, and a failure reaches the reader (U-05)."""

import dataclasses
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from alpaca_rlhf.inference.conversation import History
from alpaca_rlhf.inference.models import ChatModel
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.rollout.base import SamplingSettings, row_uniforms
from alpaca_rlhf.rollout.hf_generate import UniformSampler, neutral_generation_config

FINISHES = {
    "length": "cut at max_new_tokens",
    "stopped": "stopped",
    "turn": "the model went on as the user; that part is not shown",
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer as far as it has come.

    ``finish``: "" while it grows; then "end" (the model ended it), "turn" (the model began to write the user's next
    question, which is not shown), "length" (max_new_tokens), "stopped", or "failed" (``error`` says how).
    """

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    dropped: int = 0  # rounds of the history that the model could not read
    finish: str = ""
    error: str = ""

    def remarks(self) -> list[str]:
        """What a reader should know besides the text; a failure's sentence is in ``error``."""
        remarks = [FINISHES[self.finish]] if self.finish in FINISHES else []
        if self.finish == "end" and not self.text:
            remarks.append("the model ended at once, with an empty answer")
        if self.dropped:
            rounds = "round" if self.dropped == 1 else f"{self.dropped} rounds"
            remarks.append(f"the conversation is full: its oldest {rounds} could not be read any more")
        return remarks


def stream_answer(
    model: ChatModel, history: History, message: str, settings: Settings, *, attempt: int = 0,
    stop: threading.Event | None = None,
) -> Iterator[Answer]:  # fmt: skip
    """The growing answer to ``message`` after ``history``; the last one has a ``finish``.

    A sampled answer is a function of the conversation, the settings and ``attempt`` (which tells repeated tries apart)
    alone; other questions get other random numbers, so that one seed does not begin all answers alike. Closing the
    iterator, or setting ``stop``, ends the generation at its next token.

    Raises:
        UserError: the message cannot be asked; nothing was generated.
    """
    prompt = model.prompt(history, message, settings.max_new_tokens)
    start = Answer(prompt_tokens=len(prompt.ids), dropped=prompt.dropped)
    stop, abandoned = stop or threading.Event(), threading.Event()
    parts: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
    uniforms = row_uniforms(settings.seed, question_key(history, message), [attempt], settings.max_new_tokens)

    def work() -> Answer:
        try:
            with model.lock:
                watcher = _Watcher(model, start, lambda: stop.is_set() or abandoned.is_set(), parts.put)
                return start if watcher.stopped() else _generate(model, prompt.ids, settings, uniforms, watcher)
        finally:
            parts.put(None)

    executor = ThreadPoolExecutor(1, thread_name_prefix="answer")
    try:
        future = executor.submit(work)
        last = start
        while (part := parts.get()) is not None:
            if part.text != last.text or part is start:
                last = part
                yield part
        error = future.exception()
        if error is not None:
            yield dataclasses.replace(last, finish="failed", error=describe(error))
        else:
            final = future.result()
            yield final if final.finish else dataclasses.replace(final, finish="stopped")
    finally:
        abandoned.set()
        executor.shutdown(wait=False)


def stream_answers(
    models: Sequence[ChatModel], history: History, message: str, settings: Settings, *, attempt: int = 0,
    stop: threading.Event | None = None,
) -> Iterator[tuple[Answer, ...]]:  # fmt: skip
    """The answers of several models to one question, with one prompt, one history, one setting and one seed (U-07).

    Raises:
        UserError: as :func:`stream_answer`, before any of them begins.
    """
    for model in models:
        model.prompt(history, message, settings.max_new_tokens)
    streams = [stream_answer(model, history, message, settings, attempt=attempt, stop=stop) for model in models]
    answers = [Answer() for _ in models]
    together = len({id(model) for model in models}) == len(models)  # one that is asked twice answers one by one
    try:
        turns = [list(range(len(models)))] if together else [[index] for index in range(len(models))]
        for group in turns:
            while any(not answers[index].finish for index in group):
                for index in group:
                    if not answers[index].finish:
                        answers[index] = next(streams[index])
                yield tuple(answers)
    finally:
        for stream in streams:
            stream.close()


def question_key(history: History, message: str) -> int:
    """A number of the conversation's texts, which no tokenizer changes: every model gets the same."""
    texts = [turn.text for turn in history] + [message]
    return zlib.crc32("\0".join(texts).encode("utf-8", "surrogatepass"))


def describe(error: BaseException) -> str:
    """One sentence about an answer that failed."""
    reason = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason:
        return "out of memory: clear the conversation, or lower max_new_tokens or num_beams, and ask again"
    return f"the answer failed ({type(error).__name__}: {reason}); ask again, or clear the conversation"


class _Watcher(StoppingCriteria):
    """Looks at each new token: passes the answer on, and ends it at the user's next turn or at a stop."""

    def __init__(
        self, model: ChatModel, start: Answer, stopped: Callable[[], bool], put: Callable[[Answer], None]
    ) -> None:
        self.model = model
        self.start = start
        self.stopped = stopped
        self.put = put

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """(rows,) whether each row is done."""
        done = self.stopped()
        if len(input_ids) == 1:  # the rows of a beam search are not the answer yet
            answer = self.answer(input_ids[0].tolist())
            done = done or answer.finish == "turn"
            if not answer.finish:
                self.put(dataclasses.replace(answer, text=self.model.ends.settled(answer.text)))
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)

    def answer(self, sequence: list[int]) -> Answer:
        """The answer that a sequence of prompt and new tokens holds; ``finish`` is empty where it may go on."""
        model, ids = self.model, sequence[self.start.prompt_tokens :]
        ends = set(model.eos_ids) | model.ends.stop_ids
        length = next((index for index, token in enumerate(ids) if token in ends), len(ids))
        text, played_user = model.ends.cut(model.encoder.decode(ids[:length]))
        finish = ""
        if played_user or (length < len(ids) and ids[length] in model.ends.stop_ids):
            finish = "turn"
        elif length < len(ids):
            finish = "end"
        return dataclasses.replace(self.start, text=text, tokens=min(length + 1, len(ids)), finish=finish)


@torch.no_grad()
def _generate(model: ChatModel, ids: list[int], settings: Settings, uniforms: Tensor, watcher: _Watcher) -> Answer:
    """Generate to the end; the model's own generation settings are not consulted (P-19)."""
    device, limit = model.model.device, model.vocabulary_limit
    rows = model.model.get_output_embeddings().weight.shape[0]
    prompt = torch.tensor([ids], device=device)
    pad = model.encoder.pad_id
    config = GenerationConfig(
        do_sample=False,  # the sampler below has drawn the token already
        num_beams=settings.num_beams,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=sorted({*model.eos_ids, *model.ends.stop_ids}),
        pad_token_id=pad,
        suppress_tokens=list(range(limit, rows)) or None,
        use_cache=True,
    )
    sampling = SamplingSettings(
        max_new_tokens=settings.max_new_tokens, eos_ids=model.eos_ids, pad_id=pad, top_p=settings.top_p,
        temperature=0.0 if settings.greedy else settings.temperature, vocabulary_limit=limit,
    )  # fmt: skip
    sampler = [UniformSampler(uniforms.to(device), sampling, len(ids))] if settings.num_beams == 1 else []
    with neutral_generation_config(model.model):
        sequences = model.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            logits_processor=LogitsProcessorList(sampler),
            stopping_criteria=StoppingCriteriaList([watcher]),
        )
    answer = watcher.answer(sequences[0].tolist())
    if answer.finish:
        return answer
    return dataclasses.replace(answer, finish="stopped" if watcher.stopped() else "length")
