"""The trace survives storage, and its derivations agree with its events."""

from refusion_eval.types import Fix, Trace


def example() -> Trace:
    trace = Trace()
    trace.forward("plan", 8, 0)
    trace.select("slot", [0, 4], [0.5, 0.75], [4])
    trace.draft([4, 5], [7, 8])
    trace.forward("verify", 2, 6)
    trace.fix([4, 5], [7, 8])
    trace.stop("eos", 6)
    return trace


def test_json_round_trip_gives_an_equal_trace():
    assert Trace.from_json(example().to_json()) == example()


def test_an_event_carries_the_number_of_the_last_forward():
    assert [event.forward for event in example().events] == [0, 0, 0, 1, 1, 1]


def test_fixed_at_maps_positions_to_the_forward_that_fixed_them():
    assert example().fixed_at() == {4: 1, 5: 1}
    assert example().fixed_tokens() == {4: 7, 5: 8}
    assert [event.positions for event in example().of(Fix)] == [(4, 5)]
