"""Which records form which optimizer step, and how a step is cut into micro-batches and ranks.

The records of step k depend on (seed, epoch, global batch size) alone: global batch = micro_batch_size ·
micro_batches_per_step · world_size. Any cut of one global batch size trains the same records in the same steps.
Inside a step the records are ordered by length, so that a micro-batch is padded little; the longest come first, so
that a batch that does not fit into memory fails at once. The last, incomplete step of an epoch is trained like any
other.

Every rank gets equally many micro-batches, each of as many rows as the other ranks' (faults Z-06, M-04): where the
records run out, fillers (repeated records whose masks are 0) take their place.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

Collate = Callable[[list[dict], int], dict]


def seeded_order(count: int, seed: int, purpose: str) -> list[int]:
    """A permutation of 0..count-1 that is the same on every machine and with every version of every library.

    Indices are sorted by a hash of (seed, purpose, index); ``purpose`` keeps orders of one seed independent.
    """
    start = hashlib.blake2b(f"{seed}/{purpose}/".encode(), digest_size=16)

    def key(index: int) -> tuple[bytes, int]:
        digest = start.copy()
        digest.update(str(index).encode())
        return digest.digest(), index

    return sorted(range(count), key=key)


class StepLoader:
    """The micro-batches of one rank, one list per optimizer step."""

    def __init__(
        self,
        dataset: Sequence[dict],
        collate: Collate,
        *,
        micro_batch_size: int,
        micro_batches_per_step: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """``dataset``: anything with len and integer index; ``collate(items, real)`` makes a micro-batch."""
        assert len(dataset) > 0 and micro_batch_size > 0 and micro_batches_per_step > 0
        assert 0 <= rank < world_size, (rank, world_size)
        self.dataset, self.collate = dataset, collate
        self.micro_batch_size, self.micro_batches_per_step = micro_batch_size, micro_batches_per_step
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle = seed, shuffle
        self.global_batch_size = micro_batch_size * micro_batches_per_step * world_size
        self.steps_per_epoch = -(-len(dataset) // self.global_batch_size)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[list[dict]]:
        """One list of this rank's micro-batches per optimizer step; another order in each epoch (seed + epoch).

        ``skip``: leave out so many steps at the beginning, which a run that is resumed has behind it.
        """
        count = len(self.dataset)
        order = seeded_order(count, self.seed + epoch, "epoch") if self.shuffle else list(range(count))
        for start in range(skip * self.global_batch_size, count, self.global_batch_size):
            yield self._step(order[start : start + self.global_batch_size])

    def steps(self, start: int, total: int | None) -> Iterator[tuple[int, int, list[dict]]]:
        """(step, epoch, micro-batches) of the steps after ``start`` up to ``total`` (None: without end), over as many
        epochs as that takes; steps count from 1, epochs from 0."""
        step = start
        for epoch in itertools.count(start // self.steps_per_epoch):
            for batches in self.epoch(epoch, skip=step % self.steps_per_epoch):
                if step == total:
                    return
                step += 1
                yield step, epoch, batches

    def _step(self, rows: list[int]) -> list[dict]:
        """Cut one step's records: as few micro-batches as hold them, each dealt out to the ranks in turn."""
        items = sorted(_items(self.dataset, rows), key=lambda item: (-_length(item), item["row"]))
        width = self.micro_batch_size * self.world_size
        chunks = [items[start : start + width] for start in range(0, len(items), width)]
        return [_share(chunk, self.collate, self.rank, self.world_size) for chunk in chunks]


def evaluation_batches(
    dataset: Sequence[dict], collate: Collate, *, batch_size: int, rank: int, world_size: int
) -> Iterator[dict]:
    """Every record exactly once over all ranks, in order; equally many batches on each rank; nothing if empty."""
    assert batch_size > 0 and 0 <= rank < world_size, (batch_size, rank, world_size)
    width = batch_size * world_size
    for start in range(0, len(dataset), width):
        items = _items(dataset, range(start, min(start + width, len(dataset))))
        yield _share(items, collate, rank, world_size)


def _share(items: list[dict], collate: Collate, rank: int, world_size: int) -> dict:
    """This rank's part of ``items``, filled up to as many rows as any rank has."""
    mine = items[rank::world_size]
    fillers = -(-len(items) // world_size) - len(mine)
    return collate(mine + items[:1] * fillers, len(mine))


def _items(dataset: Sequence[dict], rows: Sequence[int]) -> list[dict]:
    return [{**dataset[row], "row": row} for row in rows]


def _length(item: dict) -> int:
    """Number of tokens: the entries of the item's lists."""
    return sum(len(value) for value in item.values() if isinstance(value, list))
