import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import data


def take(n, *args, **kwargs):
    return list(itertools.islice(data.batches(*args, **kwargs), n))


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys() == {"tokens", "targets", "mask"}
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_splits_share_no_document_and_validation_is_about_a_tenth():
    train, validation = data.corpus("train"), data.corpus("validation")
    assert not {t.tobytes() for t in train} & {v.tobytes() for v in validation if v.size > 99}
    assert 0.03 < len(validation) / (len(train) + len(validation)) < 0.2


@settings(max_examples=8)
@given(batch=st.integers(1, 9), seq_len=st.integers(1, 300), seed=st.integers(0, 99))
def test_batches_are_real_text_shifted_by_one_and_padded_at_the_end(batch, seq_len, seed):
    corpus = b"\0\0".join(text.tobytes() for text in data.corpus())
    for b in take(2, batch, seq_len, seed=seed):
        assert {k: (v.shape, v.dtype.name) for k, v in b.items()} == {
            "tokens": ((batch, seq_len), "int32"),
            "targets": ((batch, seq_len), "int32"),
            "mask": ((batch, seq_len), "float32"),
        }
        for tokens, targets, mask in zip(b["tokens"], b["targets"], b["mask"], strict=True):
            real = int(mask.sum())
            assert 1 <= real and (mask[:real] == 1).all() and not targets[real:].any()
            np.testing.assert_array_equal(tokens[1:real], targets[: real - 1])
        real = int(b["mask"][0].sum())
        assert bytes([b["tokens"][0, 0], *b["targets"][0, :real]]) in corpus


def test_one_epoch_predicts_every_byte_once():
    seq_len = 4096
    texts = data.corpus("validation")
    windows = sum(-(-(t.size - 1) // seq_len) for t in texts)
    epoch = take(windows, 1, seq_len, split="validation")
    assert sum(b["mask"].sum() for b in epoch) == sum(t.size - 1 for t in texts)
    assert any(b["mask"].min() == 0 for b in epoch)
    counted = np.zeros(256, int)
    for b in epoch:
        counted += np.bincount(b["targets"][b["mask"] == 1], minlength=256)
    np.testing.assert_array_equal(
        counted, sum(np.bincount(t[1:], minlength=256).astype(int) for t in texts)
    )


def test_the_seed_decides_and_nothing_else():
    assert_same(take(3, 4, 32, seed=1), take(3, 4, 32, seed=1))
    assert (take(1, 4, 32, seed=1)[0]["tokens"] != take(1, 4, 32, seed=2)[0]["tokens"]).any()


def test_the_position_can_be_saved_and_restored():
    batches = data.batches(4, 32)
    next(batches)
    position = batches.get_state()
    ahead = list(itertools.islice(batches, 3))
    batches.set_state(position)
    assert_same(itertools.islice(batches, 3), ahead)
    fresh = data.batches(4, 32)
    fresh.set_state(position)
    assert_same(itertools.islice(fresh, 3), ahead)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"batch": 8}, "batch was 4 and is 8"),
        ({"seq_len": 16, "seed": 7}, "seq_len was 32 and is 16; seed was 0 and is 7"),
        ({"split": "validation"}, r"split was 'train' and is 'validation'; corpus was \d+ and is"),
    ],
)
def test_a_position_in_other_batches_is_refused(other, message):
    batches = data.batches(4, 32)
    next(batches)
    position = json.loads(json.dumps(batches.get_state()))  # as a checkpoint brings it back
    others = data.batches(**{"batch": 4, "seq_len": 32} | other)
    with pytest.raises(ValueError, match="a position in other batches: " + message):
        others.set_state(position)
    assert_same([next(others)], take(1, **{"batch": 4, "seq_len": 32} | other))


@pytest.mark.parametrize("position", [None, 3, b"x", {"source": None}])
def test_what_is_no_position_is_refused(position):
    with pytest.raises(ValueError, match="split was None and is 'train'"):
        data.batches(8, 16).set_state(position)


def test_a_position_in_another_corpus_is_refused(monkeypatch):
    position = data.batches(4, 32).get_state()
    texts = list(data.corpus())
    texts[3] = texts[3] ^ 1  # one bit of each byte of one document
    monkeypatch.setattr(data, "corpus", lambda _: tuple(texts))
    with pytest.raises(ValueError, match=r"in other batches: corpus was \d+ and is \d+\. Make"):
        data.batches(4, 32).set_state(position)
    with pytest.raises(ValueError, match="in other batches: split was None and is 'train'; batch"):
        data.batches(4, 32).set_state({"next_index": 5})


def test_a_position_is_right_for_another_number_of_processes():
    batches = data.batches(6, 16, process_index=1, process_count=2)
    next(batches)
    whole = take(3, 6, 16)[1:]
    for processes in 1, 2, 3:
        for p in range(processes):
            share = data.batches(6, 16, process_index=p, process_count=processes)
            share.set_state(batches.get_state())
            mine = [{k: v[p::processes] for k, v in each.items()} for each in whole]
            assert_same(itertools.islice(share, 2), mine)


@settings(max_examples=6)
@given(processes=st.sampled_from([1, 2, 3, 4]), rows=st.integers(1, 3))
def test_processes_share_each_global_batch(processes, rows):
    batch = processes * rows
    whole = take(3, batch, 16)
    shares = [
        take(3, batch, 16, process_index=p, process_count=processes) for p in range(processes)
    ]
    for step, one in enumerate(whole):
        for p in range(processes):
            assert_same([shares[p][step]], [{k: v[p::processes] for k, v in one.items()}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch": 6, "process_count": 4},
            r"batch=6.*process_count=4.* as batch.* a multiple of process_count",
        ),
        ({"batch": 0}, "batch=0,.* expected sizes of 1 or more"),
        ({"seq_len": 0}, "seq_len=0,.* expected sizes of 1 or more"),
        ({"process_index": 2, "process_count": 2}, r"process_index=2: .*process_index below that"),
        ({"split": "test"}, r"'test'; expected 'train' or 'validation'"),
    ],
)
def test_errors_say_what_would_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.batches(**{"batch": 4, "seq_len": 8, **arguments})


@pytest.mark.parametrize("count", [1, 40])  # a file that is cut, and files that are dealt out
def test_splits_of_one_s_own_documents_are_the_two(tmp_path, count):
    files = [tmp_path / f"{i}.txt" for i in range(count)]
    for file in files:
        file.write_bytes(bytes(20))
    names = [file.name for file in files]
    train, validation = (data.documents(files, names, each) for each in ("train", "validation"))
    assert sum(map(len, train + validation)) == 20 * count and len(train) >= len(validation) > 0
    for split in "valid", "":
        with pytest.raises(ValueError, match=f"split is '{split}'; expected 'train' or 'valida"):
            data.documents(files, names, split)
    with pytest.raises(ValueError, match="split is 'test'; expected"):
        data.share(train[0], "test")


def test_a_python_without_library_sources_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="ships it unzipped"):
        data.corpus.__wrapped__("train")


def test_packed_rows_are_documents_without_padding():
    texts, seq_len = data.corpus("validation"), 512
    count = -(-(sum(t.size for t in texts) - 1) // seq_len)
    epoch = take(count, 1, seq_len, split="validation", packed=True)
    # Every byte but the first of its document, which follows none, is predicted where its row
    # has the byte before it.
    assert sum(b["mask"].sum() for b in epoch) == sum(t.size - 1 for t in texts)
    stream = np.concatenate(texts).tobytes()
    for b in epoch:
        row = {name: x[0] for name, x in b.items()}
        starts = np.flatnonzero(row["positions"] == 0)
        assert starts[0] == 0 and row["documents"][starts].tolist() == [*range(len(starts))]
        steps = np.diff(row["positions"])
        assert ((steps == 1) | (row["positions"][1:] == 0)).all()
        np.testing.assert_array_equal(np.diff(row["documents"]), row["positions"][1:] == 0)
        inside = np.flatnonzero(row["mask"]).max()  # up to the padding of the very last row
        ends = np.diff(row["documents"]) == 1
        np.testing.assert_array_equal(row["mask"][:inside] == 0, ends[:inside])
        np.testing.assert_array_equal(row["tokens"][1:], row["targets"][:-1])
        if row["mask"][-1]:
            assert row["tokens"].astype(np.uint8).tobytes() in stream
    assert max(b["documents"].max() for b in epoch) > 1


def test_a_position_in_packed_batches_is_none_in_others():
    packed, padded = data.batches(2, 16, packed=True), data.batches(2, 16)
    with pytest.raises(ValueError, match="packed was True and is None"):
        padded.set_state(packed.get_state())
