"""Alarms: figures of the log that mean a PPO run is going wrong, each said once when it begins, with its likely causes.

Pure: figures in, sentences out. What they remember is plain data, so that a resumed run goes on where it stopped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

KL_LIMIT = 30.0  # nats per answer, where neither --kl_alarm nor --kl_target says otherwise; see kl_limit
OVER_AFTER = 3  # rollouts in a row without its sign, and an alarm is over; it may then be said again
WINDOW = 5  # rollouts whose mean is compared with that of the run's first ones


class _Rule(NamedTuple):
    """An alarm: it begins when ``holds`` was true for ``rollouts`` rollouts in a row."""

    name: str
    figures: tuple[str, ...]
    """What ``holds`` is called with; a rollout that lacks one of them, or where it is not finite, does not count."""
    holds: Callable[..., bool]
    rollouts: int
    sentence: str
    """With the rollout's figures in braces."""


def kl_limit(kl_alarm: float | None, kl_target: float | None) -> float:
    """Nats per answer beyond which the KL is an alarm: as given, else three times the controller's target, else 30.

    30 is a choice: the usual target of an adaptive controller is 6 nats and this project's demo ends at 4, while the
    true reward first grows with d = the square root of the KL and then falls, as d (a - b log d) (Gao et al., arXiv
    2210.10760, eq. 1): at 30, d is more than twice that of the usual target. Long answers may need a higher limit.
    """
    if kl_alarm is not None:
        return kl_alarm
    return KL_LIMIT if kl_target is None else 3 * kl_target


class Alarms:
    """Fed with the figures of each rollout and its training; returns what has to be said now."""

    def __init__(self, *, kl_limit: float, clip_reward: float) -> None:
        """``kl_limit``: nats per answer. ``clip_reward``: where normalised scores are cut."""
        self._rules = _rules(kl_limit, clip_reward)
        self._held = {rule.name: 0 for rule in self._rules}  # rollouts in a row with the alarm's sign
        self._missed = {rule.name: 0 for rule in self._rules}  # and without it
        self._active: list[str] = []
        self._rollouts = 0
        self._first: list[list[float]] = []  # of the run's first rollouts: score, its std, adjusted distinctness
        self._recent: list[list[float]] = []  # of the last ones

    @property
    def active(self) -> list[str]:
        """The names of the alarms that hold now, in the order in which they began."""
        return list(self._active)

    def rollout(self, figures: Mapping[str, float]) -> list[str]:
        """The sentences of the alarms that begin with this rollout.

        Args:
            figures: what ``generate_experience`` and ``train_rlhf`` return, in one dictionary; a figure may be missing
                (a rollout that was skipped trains nothing) or not finite: it then says nothing.
        """
        self._rollouts += 1
        known = {name: value for name, value in figures.items() if math.isfinite(value)}
        known |= self._since_the_start(known)
        begun = []
        for rule in self._rules:
            if not all(name in known for name in rule.figures):
                continue
            holds = rule.holds(*(known[name] for name in rule.figures))
            self._held[rule.name] = self._held[rule.name] + 1 if holds else 0
            self._missed[rule.name] = 0 if holds else self._missed[rule.name] + 1
            if rule.name not in self._active and self._held[rule.name] >= rule.rollouts:
                self._active.append(rule.name)
                begun.append(f"alarm at rollout {self._rollouts}: {rule.sentence.format(**known)}")
            elif rule.name in self._active and self._missed[rule.name] >= OVER_AFTER:
                self._active.remove(rule.name)
        return begun

    def metrics(self) -> dict[str, float]:
        """For the log: ``alarms``, how many hold now, and a 1 under the name of each."""
        return {"alarms": float(len(self._active)), **{f"alarm/{name}": 1.0 for name in self._active}}

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "rollouts": self._rollouts,
            "held": dict(self._held),
            "missed": dict(self._missed),
            "active": list(self._active),
            "first": [list(row) for row in self._first],
            "recent": [list(row) for row in self._recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the object that gave ``state``."""
        self._rollouts = state["rollouts"]
        self._held, self._missed = dict(state["held"]), dict(state["missed"])
        self._active = list(state["active"])
        self._first, self._recent = ([list(row) for row in state[name]] for name in ("first", "recent"))

    def _since_the_start(self, known: Mapping[str, float]) -> dict[str, float]:
        """How the last rollouts differ from the first: ``score_gain`` in standard deviations of the first scores, and
        ``distinct_left``, distinctness as a share of the first.

        The share of different bigrams falls with the amount of text, whoever writes it: by Heaps' law (H. S. Heaps,
        1978) different ones grow like the square root of all, so the share times the square root of the tokens is
        compared. Answers that merely grow longer are no alarm.
        """
        if not all(name in known for name in ("score", "score_std", "distinct_2", "answer_tokens")):
            return {}
        row = [known["score"], known["score_std"], known["distinct_2"] * math.sqrt(known["answer_tokens"])]
        if len(self._first) < WINDOW:
            self._first.append(row)
            return {}
        self._recent = [*self._recent, row][-WINDOW:]
        if len(self._recent) < WINDOW:
            return {}
        (score, std, distinct), (later_score, _, later_distinct) = _means(self._first), _means(self._recent)
        if std == 0 or distinct == 0:
            return {}
        return {"score_gain": (later_score - score) / std, "distinct_left": later_distinct / distinct}


def _rules(kl_limit: float, clip_reward: float) -> tuple[_Rule, ...]:
    return (
        _Rule(
            "kl_high", ("kl",), lambda kl: kl > kl_limit, 1,
            f"the KL to the reference is {{kl:.1f}} nats per answer, beyond {kl_limit:g} (--kl_alarm): the policy has "
            "left what the reward model was trained on; --actor_learning_rate is too high, --kl_coef too low, or the "
            "run too long",
        ),
        _Rule(
            "kl_negative", ("kl",), lambda kl: kl < -0.1, 3,
            "the KL to the reference has been negative for three rollouts, now {kl:.2f}: answers are sampled from "
            "another distribution than they are scored by (--top_p, --top_k), or the reference is another model",
        ),
        _Rule(
            "scores_clipped", ("clipped_score_share",), lambda share: share > 0.2, 1,
            f"{{clipped_score_share:.0%}} of the scores are beyond ±{clip_reward:g} and clipped, so that they no "
            "longer tell answers apart: scores are not normalised (--reward_normalization), the statistics are of "
            "other answers, or the policy has found what the reward model overrates",
        ),
        _Rule(
            "no_answer_ends", ("ended_share",), lambda share: share == 0, 2,
            "no answer has ended by itself for two rollouts: --max_answer_seq_len is too short, step 1 never trained "
            "an end (answers cut at its limit have none), or the reward model likes length; see "
            "--missing_eos_penalty",
        ),
        _Rule(
            "empty_answers", ("empty_share",), lambda share: share > 0.9, 2,
            "{empty_share:.0%} of the answers are empty: the prompts end where an answer should have ended (see "
            "--inspect and --template), or the reward model scores silence above the answers",
        ),
        _Rule(
            "distinctness_falls", ("score_gain", "distinct_left"), lambda gain, left: gain > 0.25 and left < 0.5, 1,
            "the score has risen by {score_gain:.1f} of its standard deviations while the answers have only "
            "{distinct_left:.0%} of the distinctness they began with: the policy repeats what the reward model "
            "overrates; read answers (--print_answers), raise --kl_coef, or improve the reward model",
        ),
        _Rule(
            "policy_clipped", ("clip_share",), lambda share: share > 0.3, 2,
            "{clip_share:.0%} of the tokens are outside PPO's clip range: the policy moves too far on one rollout; "
            "lower --actor_learning_rate, use fewer --ppo_epochs, or larger minibatches",
        ),
        _Rule(
            "critic_useless", ("explained_variance",), lambda share: share < 0, 10,
            "the critic's values have explained less than nothing of the returns for ten rollouts (explained variance "
            "{explained_variance:.2f}): --critic_learning_rate is too low or too high, or the critic did not start "
            "from this reward model",
        ),
    )  # fmt: skip


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
