"""Steps that depend on the seed and the global batch size alone, and ranks that always do equally much."""

import itertools
from collections import Counter

import pytest

from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader, evaluation_batches, seeded_order

CUTS = [(n, m, a, w) for n in (1, 2, 5, 7, 12, 13, 24) for m in (1, 2, 3) for a in (1, 2, 4) for w in (1, 2, 3)]


def records(count: int) -> list[dict]:
    return [{"prompt_ids": [1] * (1 + (7 * i) % 11), "record": f"f:{i}"} for i in range(count)]


def collate(items: list[dict], real: int) -> dict:
    assert 0 <= real <= len(items) and items
    return {"rows": [item["row"] for item in items[:real]], "size": len(items), "all": [i["row"] for i in items]}


def loader(count, micro, accumulation, rank, world, seed=3, **options) -> StepLoader:
    return StepLoader(
        records(count), collate, micro_batch_size=micro, micro_batches_per_step=accumulation,
        rank=rank, world_size=world, seed=seed, **options,
    )  # fmt: skip


def steps_of(count, micro, accumulation, world, epoch=0, **options) -> list[list[list[dict]]]:
    """[step][rank][micro-batch]"""
    ranks = [list(loader(count, micro, accumulation, r, world, **options).epoch(epoch)) for r in range(world)]
    return [list(step) for step in zip(*ranks, strict=True)]


def rows(step) -> list[int]:
    return [row for rank in step for batch in rank for row in batch["rows"]]


@pytest.mark.parametrize("count, micro, accumulation, world", CUTS)
def test_Z06_M04_every_rank_does_equally_much_and_every_record_counts_once(count, micro, accumulation, world):
    steps = steps_of(count, micro, accumulation, world)
    size = micro * accumulation * world
    assert len(steps) == loader(count, micro, accumulation, 0, world).steps_per_epoch == -(-count // size)
    order = seeded_order(count, 3, "epoch")
    for number, step in enumerate(steps):
        members = order[number * size : (number + 1) * size]
        assert Counter(rows(step)) == Counter(members)
        shapes = [[batch["size"] for batch in rank] for rank in step]
        assert all(shape == shapes[0] for shape in shapes)
        assert len(shapes[0]) == -(-len(members) // (micro * world)) <= accumulation
        assert all(1 <= rows_of <= micro for rows_of in shapes[0])
        assert sum(shapes[0]) * world - len(members) < world  # never more fillers than one row of ranks


@pytest.mark.parametrize("count", [5, 12, 13])
def test_a_step_holds_the_same_records_however_it_is_cut(count):
    for size in (4, 6, 12):
        cuts = [c for c in itertools.product((1, 2, 3, 4, 6, 12), repeat=3) if c[0] * c[1] * c[2] == size]
        steps = [[sorted(rows(step)) for step in steps_of(count, *cut)] for cut in cuts]
        assert len(cuts) > 3 and all(other == steps[0] for other in steps)


def test_S04_the_last_incomplete_step_is_trained():
    steps = steps_of(13, 2, 2, 2)
    assert [len(rows(step)) for step in steps] == [8, 5]


def test_Z06_five_records_batch_two_two_ranks():
    (step,) = steps_of(5, 2, 2, 2)
    assert [[batch["size"] for batch in rank] for rank in step] == [[2, 1], [2, 1]]
    assert [[len(batch["rows"]) for batch in rank] for rank in step] == [[2, 1], [2, 0]]
    assert step[1][1]["all"] == step[0][1]["rows"]  # a filler is a real record


def test_D07_each_epoch_has_its_own_order_and_a_run_can_be_repeated():
    orders = [[sorted(rows(step)) for step in steps_of(24, 2, 2, 1, epoch)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert [sorted(rows(s)) for s in steps_of(24, 2, 2, 1, seed=4)] == orders[1]  # seed + epoch
    plain = [sorted(rows(step)) for step in steps_of(24, 2, 2, 1, shuffle=False)]
    assert plain == [list(range(start, start + 4)) for start in range(0, 24, 4)]


def test_micro_batches_of_a_step_are_cut_by_length():
    data = records(24)
    for step in steps_of(24, 3, 4, 2):
        lengths = [sorted(len(data[r]["prompt_ids"]) for rank in step for r in rank[k]["rows"]) for k in range(4)]
        assert all(longer[0] >= shorter[-1] for longer, shorter in itertools.pairwise(lengths))


def test_the_order_is_a_fixed_permutation():
    assert seeded_order(8, 1234, "split") == seeded_order(8, 1234, "split")
    assert sorted(seeded_order(1000, 5, "split")) == list(range(1000))
    assert seeded_order(10, 5, "split") != seeded_order(10, 5, "epoch")
    assert seeded_order(0, 5, "split") == []


@pytest.mark.parametrize("count, batch, world", [(n, b, w) for n in (1, 4, 5, 7) for b in (1, 2, 3) for w in (1, 2, 3)])
def test_M04_evaluation_counts_every_record_once(count, batch, world):
    ranks = [
        list(evaluation_batches(records(count), collate, batch_size=batch, rank=rank, world_size=world))
        for rank in range(world)
    ]
    seen = [row for batches in ranks for b in batches for row in b["rows"]]
    assert sorted(seen) == list(range(count))
    assert all([b["size"] for b in batches] == [b["size"] for b in ranks[0]] for batches in ranks)
    assert max(b["size"] for b in ranks[0]) <= batch


def test_D06_an_empty_evaluation_set_gives_no_batches():
    assert list(evaluation_batches([], collate, batch_size=2, rank=0, world_size=2)) == []
