"""Laws of inputs: contract tests that every input must pass.

The test of an input is one line, with a function that makes a new input of fixed fields, some of
which are replaced:

    @pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
    def test_my_input(law):
        law(lambda **fields: MyInput(**{"batch_size": 4, **fields}))

`make()` should return an input of one host. Batches of 4, 8 or 12 rows allow several numbers of
hosts. Test both an endless input and one with a few batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import PADDING_VALUES, concatenate_rows
from layerkit_inputs.base.host_batches import check_batch, spec_of

Make = Callable[..., BaseInput]

_MOST_BATCHES = 6
"""Number of batches to read of an endless input; epochs must end within `_LONGEST_EPOCH`."""
_LONGEST_EPOCH = 64


def take(source: BaseInput, most: int = _MOST_BATCHES) -> list[NestedMap]:
    """Return copies of the next batches of an input, at most `most`."""
    batches = []
    for _ in range(most):
        try:
            batches.append(source.get_next().transform(np.copy))
        except StopIteration:
            break
    return batches


def assert_same_batches(actual: list[NestedMap], expected: list[NestedMap]) -> None:
    """Assert that two lists of batches have the same fields, dtypes and values, bit for bit."""
    assert len(actual) == len(expected), f"{len(actual)} batches, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert spec_of(one) == spec_of(other), f"batch {number}"
        for (path, left), (_, right) in zip(
            one.flatten_items(), other.flatten_items(), strict=True
        ):
            np.testing.assert_array_equal(left, right, err_msg=f"batch {number}, {path}")


def batches_have_their_size(make: Make) -> None:
    """Check that all batches have `batch_size` rows and the same fields, shapes and dtypes."""
    source = make()
    batches = take(source)
    assert batches, "no batch at all"
    for batch in batches:
        check_batch(source, batch)
        assert spec_of(batch) == spec_of(batches[0])


def making_it_again_repeats_it(make: Make) -> None:
    """Check that two inputs of the same fields give the same batches."""
    assert_same_batches(take(make()), take(make()))


def peek_consumes_nothing(make: Make) -> None:
    """Check that `peek` returns the next batch any number of times and does not advance."""
    expected = take(make())
    source = make()
    for batch in expected:
        assert_same_batches([source.peek(), source.peek()], [batch, batch])
        assert_same_batches([source.get_next()], [batch])


def every_state_resumes(make: Make) -> None:
    """Check that a state after any batch restores the rest, through JSON and after a peek."""
    expected = take(make())
    source = make()
    for done in range(len(expected) + 1):
        state = json.loads(json.dumps(source.get_state()))
        fresh = make()
        fresh.set_state(state)
        assert_same_batches(take(fresh, len(expected) - done), expected[done:])
        if done < len(expected):
            source.peek()
            assert source.get_state() == state, (
                "the state after a peek must equal the state before it"
            )
            source.get_next()
    source.set_state(make().get_state())
    assert_same_batches(take(source), expected)


def reset_starts_over(make: Make) -> None:
    """Check that `reset` restarts the stream, also after a peek and after the end."""
    source = make()
    expected = take(source)
    source.reset()
    assert_same_batches(take(source, 1), expected[:1])
    if len(expected) > 1:
        source.peek()
    source.reset()
    assert_same_batches(take(source), expected)


def batches_belong_to_the_caller(make: Make) -> None:
    """Check that writing into a batch changes no other batch."""
    expected = take(make())
    source = make()
    for _ in expected:
        for _, array in source.get_next().flatten_items():
            if array.flags.writeable:
                array[...] = 0
    source.reset()
    assert_same_batches(take(source), expected)


def the_end_is_kept(make: Make) -> None:
    """Check that an endless input never ends, and that another keeps raising StopIteration."""
    source = make()
    if source.endless:
        assert len(take(source)) == _MOST_BATCHES
        return
    assert len(take(source, _LONGEST_EPOCH)) < _LONGEST_EPOCH, "the epoch is too long for a test"
    for call in (source.get_next, source.peek, source.get_next_padded):
        try:
            call()
        except StopIteration:
            continue
        raise AssertionError("a batch after the end")


def padding_counts_for_nothing(make: Make) -> None:
    """Check that `get_next_padded` only appends rows of weight 0 and provenance -1."""
    rows = 3
    plain, padded = make(), make(batch_padding_size=rows)
    for batch in take(plain):
        longer = padded.get_next_padded()
        assert_same_batches([longer.transform(lambda array: array[:-rows])], [batch])
        for path, array in longer.flatten_items():
            value = PADDING_VALUES.get(path.rsplit(".", 1)[-1], 0)
            np.testing.assert_array_equal(array[-rows:], value, err_msg=path)


def evaluations_follow_the_fields(make: Make) -> None:
    """Check that evaluations repeat the epoch with `reset_for_eval`, and else continue."""
    source = make()
    if source.is_training:
        return
    first, second = list(source.eval_batches()), list(source.eval_batches())
    if source.reset_for_eval:
        assert_same_batches(second, first)
    else:
        rolling = make()
        count = source.eval_loop_num_batches
        assert count is not None
        expected = [rolling.get_next_padded().transform(np.copy) for _ in range(2 * count)]
        assert_same_batches([*first, *second], expected)


def hosts_share_the_stream(make: Make) -> None:
    """Check that all hosts make the same number of batches, and together the global stream.

    Inputs of scope `host` may distribute rows differently, but read no row twice in an epoch.
    """
    whole = make()
    expected = take(whole, _LONGEST_EPOCH if not whole.endless else _MOST_BATCHES)
    size = whole.global_batch_size
    for count in (n for n in range(1, size + 1) if size % n == 0):
        hosts = _hosts(make, size, count)
        streams = [
            take(host, len(expected) + 1 if not whole.endless else _MOST_BATCHES) for host in hosts
        ]
        assert len({len(stream) for stream in streams}) == 1, f"{count} hosts differ in length"
        if whole.state_scope == "global":
            assert_same_batches(_side_by_side(streams), expected)
        elif not whole.endless:
            _assert_no_row_twice(streams)


def any_number_of_hosts_resumes_any_state(make: Make) -> None:
    """Check that each batch and the state after it are the same on any number of hosts.

    This holds for scope `global`. So the number of hosts may change after every batch.
    """
    whole = make()
    if whole.state_scope != "global":
        return
    size, state = whole.global_batch_size, None
    for batch in take(whole):
        states = []
        for count in (n for n in range(1, size + 1) if size % n == 0):
            hosts = _hosts(make, size, count)
            for host in hosts:
                if state is not None:
                    host.set_state(state)
            assert_same_batches(_side_by_side([take(host, 1) for host in hosts]), [batch])
            states += [host.get_state() for host in hosts]
        assert all(other == states[0] for other in states), "hosts have different states"
        state = json.loads(json.dumps(states[0]))


def states_of_hosts_stay_with_them(make: Make) -> None:
    """Check that other hosts reject a state of scope `host` with a ValueError."""
    whole = make()
    size = whole.global_batch_size
    if whole.state_scope == "global" or size % 2:
        return
    first, second = _hosts(make, size, 2)
    take(first, 1)
    for other in (second, whole):
        try:
            other.set_state(first.get_state())
        except ValueError:
            continue
        raise AssertionError("a state of scope `host` was accepted by another host")


def closing_ends_it(make: Make) -> None:
    """Check that `close` may be called at any time and twice, and that no batch follows."""
    for used in (0, 1):
        source = make()
        take(source, used)
        source.close()
        source.close()
        try:
            source.get_next()
        except RuntimeError:
            continue
        raise AssertionError("a batch of a closed input")


def _hosts(make: Make, size: int, count: int) -> list[BaseInput]:
    return [
        make(batch_size=size // count, infeed_host_index=host, num_infeed_hosts=count)
        for host in range(count)
    ]


def _side_by_side(streams: list[list[NestedMap]]) -> list[NestedMap]:
    """Return the global batches, which concatenate the rows of the hosts in order."""
    return [concatenate_rows(parts) for parts in zip(*streams, strict=True)]


def _assert_no_row_twice(streams: list[list[NestedMap]]) -> None:
    batches = [batch for stream in streams for batch in stream if "provenance" in batch]
    if batches:
        rows = np.concatenate([batch.provenance.ravel() for batch in batches])
        rows = rows[rows >= 0]
        assert len(rows) == len(np.unique(rows)), "a row was read twice"


LAWS: tuple[Callable[[Make], None], ...] = (
    batches_have_their_size,
    making_it_again_repeats_it,
    peek_consumes_nothing,
    every_state_resumes,
    reset_starts_over,
    batches_belong_to_the_caller,
    the_end_is_kept,
    padding_counts_for_nothing,
    evaluations_follow_the_fields,
    hosts_share_the_stream,
    any_number_of_hosts_resumes_any_state,
    states_of_hosts_stay_with_them,
    closing_ends_it,
)
