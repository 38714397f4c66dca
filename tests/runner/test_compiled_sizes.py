"""Which size a step takes: the smallest compiled one that is large enough, its own where it may."""

import concurrent.futures

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccjax.runner.batch_sizes import BatchSizes
from ccjax.runner.buckets import batch_bucket, entry_bucket, segment_bucket, slot_bucket, token_bucket
from ccjax.runner.compiled_sizes import CompiledSizes


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> None:
    """All sizes, as engines have them in use."""


def compiled(*keys) -> CompiledSizes:
    sizes = CompiledSizes()
    for kind, *size in keys:
        sizes.note(kind, tuple(size))
    return sizes


def test_without_substitution_each_step_uses_its_natural_size():
    sizes = compiled(("pack", 1024, 2048, 16), ("decode", 32, 1024), ("batch", 8), ("write", 1024))
    assert sizes.pack([100], 300, 5) == (token_bucket(100), slot_bucket(300), segment_bucket(5)) == (128, 512, 16)
    assert sizes.pack([100], 300, 0) == (128, 512, 0)
    assert sizes.fewer("pack", (128, 2048, 16), 33) == (64, 2048, 16)
    assert sizes.decode(3, 40) == (batch_bucket(3), entry_bucket(40)) == (4, 64)
    assert (sizes.batch(2), sizes.write(10)) == (2, 16)
    assert sizes.next() is None and sizes.num_left == 0


def test_smallest_compiled_size_is_used_and_the_natural_size_requested():
    sizes = compiled(
        ("pack", 1024, 2048, 16),
        ("pack", 256, 2048, 16),
        ("pack", 128, 256, 16),  # too few slots
        ("pack", 256, 8192, 16),
        ("pack", 256, 2048, 0),  # without masses
        ("decode", 8, 1024),
        ("decode", 32, 64),
        ("batch", 8),
        ("write", 512),
    )
    sizes.substitute([("pack", (32, 256, 16)), ("pack", (256, 2048, 16))])
    assert (sizes.num_left, sizes.next()) == (1, ("pack", (32, 256, 16)))  # the other one is compiled
    assert sizes.pack([100], 300, 5) == (256, 2048, 16)
    assert sizes.next() == ("pack", (128, 512, 16)) and sizes.num_left == 2
    assert sizes.pack([100], 5000, 5) == (256, 8192, 16)
    assert sizes.decode(3, 40) == (8, 1024)
    assert (sizes.batch(2), sizes.batch(1), sizes.write(10)) == (8, 8, 512)
    assert sizes.num_left == 7  # each once, however often it is asked for
    assert sizes.pack([100], 300, 5) == (256, 2048, 16) and sizes.num_left == 7
    assert sizes.pack([1024], 8192, 5) == (1024, 8192, 16)  # nothing is large enough: as it is
    assert sizes.pack([100], 300, 20) == (128, 512, 64)
    assert sizes.batch(9) == 16 and sizes.num_left == 7


def test_remaining_rows_of_a_pack_keep_its_slots_and_columns():
    sizes = compiled(("pack", 64, 8192, 16), ("pack", 128, 2048, 16), ("pack", 64, 2048, 64), ("pack", 32, 1024, 16))
    sizes.substitute(())
    assert sizes.fewer("pack", (256, 2048, 16), 20) == (128, 2048, 16) and sizes.next() == ("pack", (32, 2048, 16))
    assert sizes.fewer("pack", (256, 2048, 64), 20) == (64, 2048, 64)
    assert sizes.fewer("pack", (256, 4096, 16), 20) == (32, 4096, 16) and sizes.num_left == 2


def test_pack_that_drops_rows_runs_at_slots_where_small_sizes_are_compiled():
    sizes = compiled(("pack", 768, 1024, 16), ("pack", 832, 2048, 16), ("pack", 128, 2048, 16), ("pack", 32, 8192, 16))
    sizes.substitute(())
    assert sizes.pack([768, 768, 768], 900, 5) == (768, 1024, 16) and sizes.next() is None  # no row is dropped
    assert sizes.pack([768, 100, 90], 900, 5) == (832, 2048, 16)
    wanted = [("pack", (128, 1024, 16)), ("pack", (96, 1024, 16))]
    for key in wanted:
        assert sizes.next() == key
        sizes.note(*key)
    assert sizes.next() is None and sizes.pack([768, 100, 90], 900, 5) == (768, 1024, 16)


def test_newly_compiled_size_is_used_and_no_longer_pending():
    sizes = compiled(("decode", 32, 1024))
    sizes.substitute([("decode", (1, 32)), ("decode", (2, 32))])
    assert sizes.decode(2, 10) == (32, 1024) and sizes.num_left == 2
    assert sizes.next() == ("decode", (2, 32))  # wanted, so first
    assert sizes.note("decode", (2, 32)) and not sizes.note("decode", (2, 32))
    assert sizes.decode(2, 10) == (2, 32) and sizes.decode(1, 10) == (2, 32)
    assert sizes.next() == ("decode", (1, 32)) and sizes.num_left == 1
    sizes.note("decode", (1, 32))
    assert sizes.decode(1, 10) == (1, 32) and sizes.next() is None and sizes.num_left == 0
    assert sizes.compiled("decode") == {(1, 32), (2, 32), (32, 1024)} and sizes.compiled("pack") == frozenset()


def test_a_size_that_cannot_be_compiled_is_never_asked_for_again():
    sizes = compiled(("batch", 8))
    sizes.substitute([("batch", (4,))])
    assert sizes.batch(1) == 8 and sizes.num_left == 2
    for size in (1, 4):
        sizes.give_up(("batch", (size,)))
    assert sizes.batch(1) == sizes.batch(3) == 8 and sizes.next() is None and sizes.num_left == 0


@given(
    st.sets(st.tuples(st.integers(1, 1200), st.integers(1, 9000), st.integers(0, 70)), max_size=12),
    st.tuples(st.integers(1, 1200), st.integers(1, 9000), st.integers(0, 70)),
)
def test_pack_uses_a_compiled_size_that_fits_if_there_is_one(numbers, wanted):
    sizes = CompiledSizes()
    known = {sizes.pack([rows], slots, segments) for rows, slots, segments in numbers}
    for size in known:
        sizes.note("pack", size)
    rows, *where = wanted
    natural = sizes.pack([rows], *where)
    sizes.substitute(())
    taken = sizes.pack([rows], *where)
    large_enough = {size for size in known if all(map(int.__ge__, size, natural))}
    assert taken == min(large_enough, default=natural)
    assert all(map(int.__ge__, taken, (*wanted[:2], wanted[2])))
    assert sizes.next() == (None if taken == natural else ("pack", natural))


@pytest.mark.parametrize(
    ("length", "most", "first", "listed", "largest"),
    [
        (8192, 1024, 10, 111, {32, 320, 1024}),  # a CPU's
        (8192, 8192, 11, 129, {32, 320, 2048, 8192}),  # an accelerator's
        (131072, 8192, 15, 165, {32, 320, 2048, 8192}),
    ],
)
def test_packs_of_more_rows_are_compiled_at_a_few_more_sizes(length, most, first, listed, largest):
    sizes = BatchSizes(length, max_num_batched_tokens=most)
    packs, num_slots = sizes.first_packs(), sizes.context_tokens
    assert len(packs) <= first and len(sizes.packs()) <= listed
    assert {rows for rows, slots in packs if slots == num_slots} >= largest
    assert {rows for rows, slots in sizes.packs() if slots == num_slots} == largest | {16, 64}
    for rows in range(1, most + 1):
        taken = min(size for size, slots in packs if size >= rows and slots == num_slots)
        assert taken <= max(320, 7 * rows)


def test_compiled_sizes_can_be_used_by_several_threads_at_once():
    sizes = compiled(("pack", 1024, 8192, 16))
    sizes.substitute(())

    def ask(number: int) -> bool:
        rows, slots, columns = sizes.pack([1 + number % 700], 1 + 3 * number % 4000, 3)
        if number % 3 == 0 and (key := sizes.next()) is not None:
            sizes.note(*key)
        return rows >= 1 + number % 700 and slots >= 1 + 3 * number % 4000 and columns == 16

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(3000)))
    while (key := sizes.next()) is not None:
        sizes.note(*key)
    assert sizes.num_left == 0


@pytest.mark.parametrize("most", [16, 32, 128, 1024, 8192])
@pytest.mark.parametrize("length", [128, 2048, 8192, 131072])
def test_every_listed_size_fits_into_one_compiled_first(length, most):
    sizes = BatchSizes(length, max_num_batched_tokens=most)
    packs, decodes = sizes.first_packs(), sizes.first_decodes()
    assert len(packs) + len(decodes) <= min(20, len(sizes.packs()) + len(sizes.decodes()))
    usual = slot_bucket(2 * min(most, length))
    for rows, slots in sizes.packs():
        taken = min(size for size in packs if size[0] >= rows and size[1] >= slots)
        if slots <= usual and rows >= 32:
            assert taken[0] <= 1.5 * rows
    for batch, entries in sizes.decodes():
        assert any(size[0] >= batch and size[1] >= entries for size in decodes)
