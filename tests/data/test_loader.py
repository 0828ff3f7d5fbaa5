import pytest

from tests.tiny import word_tokenizer
from verl.common.errors import ConfigError
from verl.data.config import DataConfig
from verl.data.loader import Loader, batches
from verl.data.prompts import load_prompts


def dataset(count):
    source = [{"prompt": f"w{6 + i}", "ground_truth": i} for i in range(count)]
    return load_prompts(source, DataConfig(), word_tokenizer())


def ids(rows):
    return [row.row_id for row in rows]


def make(count, size, **keys):
    return Loader(dataset(count), size, seed=keys.pop("seed", 1), **keys)


def all_ids(loader, start=0, stop=None):
    return [i for k in range(start, stop or loader.num_batches) for i in ids(loader.batch(k))]


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
def test_a_resumed_run_gets_what_a_straight_run_gets(stop):
    straight = make(8, 2, epochs=2)
    resumed = make(8, 2, epochs=2)
    assert all_ids(resumed, stop) == all_ids(straight)[2 * stop :]


def test_resume_at_the_end_of_an_epoch_visits_each_row_of_the_next_once():
    loader = make(8, 2, epochs=2)
    assert loader.num_batches == 8
    assert sorted(all_ids(loader, 4)) == list(range(8))


def test_resume_before_the_end_of_an_epoch_gets_the_rows_not_yet_seen():
    loader = make(8, 2, epochs=2)
    seen = all_ids(make(8, 2, epochs=2), 0, 3)
    assert sorted(ids(loader.batch(3))) == sorted(set(range(8)) - set(seen))


def test_resume_at_the_end_has_nothing_left():
    loader = make(8, 2, epochs=2)
    with pytest.raises(IndexError, match="batch 8 of 8"):
        loader.batch(8)
    with pytest.raises(IndexError):
        loader.batch(-1)
    assert [loader.ends_at(index) for index in (0, 7, 8, 9)] == [False, False, True, True]
    assert not make(8, 2).ends_at(10**9)


@pytest.mark.parametrize(("count", "size"), [(8, 3), (3, 8), (7, 7), (1, 4), (5, 2)])
def test_each_epoch_visits_each_row_once_across_batch_borders(count, size):
    seen = all_ids(make(count, size, epochs=4))
    assert len(seen) == 4 * count
    assert all(sorted(seen[i : i + count]) == list(range(count)) for i in range(0, 4 * count, count))


def test_epochs_differ_and_so_do_seeds_but_not_runs():
    first = all_ids(make(20, 5, epochs=2))
    assert first[:20] != first[20:] and first[:20] != list(range(20))
    assert first == all_ids(make(20, 5, epochs=2))
    assert first != all_ids(make(20, 5, epochs=2, seed=2))
    assert first == all_ids(make(20, 4, epochs=2))


def test_without_shuffling_the_order_is_that_of_the_data():
    assert all_ids(make(3, 2, epochs=2, shuffle=False)) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("epochs", "sizes"), [(1, [4, 4, 2]), (1.5, [4, 4, 4, 3]), (0.25, [3]), (2, [4] * 5), (0.1, [1])]
)
def test_only_the_last_batch_of_finite_epochs_is_short(epochs, sizes):
    loader = make(10, 4, epochs=epochs)
    assert [len(loader.batch(k)) for k in range(loader.num_batches)] == sizes


def test_endless_epochs_fill_every_batch():
    loader = make(3, 8)
    assert loader.num_batches is None
    assert [len(loader.batch(k)) for k in (0, 1, 1000)] == [8, 8, 8]
    assert len(make(3, 256, epochs=1).batch(0)) == 3


@pytest.mark.parametrize(
    ("count", "keys", "said"),
    [
        (1, {"epochs": 0}, "epochs must be"),
        (1, {"epochs": float("inf")}, "epochs must be"),
        (1, {"size": 0}, "rows_per_batch=0"),
        (0, {}, "at least one row"),
    ],
)
def test_sizes_that_make_no_batch(count, keys, said):
    rows = dataset(1)[:count]
    with pytest.raises(ConfigError, match=said):
        Loader(rows, keys.pop("size", 2), seed=0, **keys)


@pytest.mark.parametrize(("count", "size", "sizes"), [(10, 4, [4, 4, 2]), (3, 256, [3]), (4, 4, [4]), (5, 1, [1] * 5)])
def test_validation_visits_every_row_once_in_order(count, size, sizes):
    parts = list(batches(dataset(count), size))
    assert [len(part) for part in parts] == sizes
    assert [i for part in parts for i in ids(part)] == list(range(count))
    scores = [float(row.ground_truth) for part in parts for row in part]
    assert sum(scores) / len(scores) == (count - 1) / 2


def test_validation_batches_need_a_size():
    with pytest.raises(ConfigError, match="size 0"):
        batches(dataset(1), 0)
