"""reward_stats.json: how a reward model's scores are distributed, measured by step 2, read by step 3 (R-05)."""

import hashlib
import json
from pathlib import Path

from alpaca_rlhf.algorithms.rewards import MIN_STD, RewardStats
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import weights_digest

FILE = "reward_stats.json"


def write_reward_stats(directory: Path, stats: RewardStats, population: str) -> None:
    """Save the statistics beside the weights they were measured with; ``population`` names the answers scored."""
    record = {
        "population": population,
        "mean": stats.mean,
        "std": stats.std,
        "count": stats.count,
        "weights_sha256": weights_digest(directory),
    }
    (Path(directory) / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_reward_stats(directory: str | Path) -> RewardStats:
    """The saved statistics.

    Raises:
        UserError: no such file, unreadable, or measured with other weights than those in the directory.
    """
    path = Path(directory) / FILE
    remedy = "run step 2 to make it, or choose --reward_normalization running or off"
    if not path.is_file():
        raise UserError(f"{directory} has no {FILE}, which --reward_normalization saved reads: {remedy}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        stats = RewardStats(float(record["mean"]), float(record["std"]), int(record["count"]))
        digest = record["weights_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): {remedy}") from error
    if digest != weights_digest(directory):
        raise UserError(f"{path} was measured with other weights than those in {directory}: {remedy}")
    if stats.std < MIN_STD:
        raise UserError(f"the scores in {path} do not vary (std {stats.std} over {stats.count} answers): {remedy}")
    return stats


def reward_stats_digest(directory: str | Path) -> str:
    """SHA-256 of a directory's statistics file; the file must exist."""
    return hashlib.sha256((Path(directory) / FILE).read_bytes()).hexdigest()
