from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.scaleout.desk import LOSSES_BEFORE_LONE, MOST_LOSSES, Desk


def desk_with(*alone):
    """A desk with a request for each flag."""
    desk = Desk()
    for number, flag in enumerate(alone):
        desk.put(number, {"alone": flag})
    return desk


def take_all(desk, worker):
    numbers = []
    while (entry := desk.claim(worker)) is not None:
        numbers.append(entry.number)
    return numbers


def test_requests_are_handed_out_in_order_and_once():
    desk = desk_with(False, False, False)
    assert desk.claim("v").number == 0
    assert take_all(desk, "w") == [1, 2]
    assert desk.claim("v") is None
    assert (desk.num_held("v"), desk.num_held("w"), desk.num_waiting()) == (1, 2, 0)


def test_what_is_measured_alone_comes_first():
    desk = desk_with(False, True)
    assert desk.next_is_alone()
    assert desk.claim("v").number == 1
    assert not desk.next_is_alone()
    assert desk.claim("v").number == 0


def test_a_request_that_was_not_begun_is_the_next_to_be_handed_out():
    desk = desk_with(False, False, False)
    assert [desk.claim("v").number, desk.claim("v").number] == [0, 1]
    desk.give_back("v", 1)
    assert desk.num_held("v") == 1
    assert take_all(desk, "w") == [1, 2]


def test_what_waits_can_be_forgotten_and_what_workers_have_is_not():
    desk = desk_with(False, True, False)
    assert desk.claim("v").number == 1
    assert sorted(desk.clear()) == [0, 2]
    assert desk.num_waiting() == 0
    assert desk.lose("v") == (1, [])
    assert take_all(desk, "w") == [1]


def test_requests_of_a_dead_worker_go_to_another():
    desk = desk_with(False, False)
    assert take_all(desk, "dead") == [0, 1]
    desk.finished("dead", 0)
    assert desk.lose("dead") == (1, [])
    assert take_all(desk, "other") == [1]


def test_a_worker_whose_every_record_arrived_loses_nothing():
    desk = desk_with(False)
    take_all(desk, "w")
    desk.finished("w", 0)
    assert desk.lose("w") == (0, [])
    assert desk.num_waiting() == 0


def test_a_request_that_was_lost_often_has_its_worker_for_itself():
    desk = desk_with(False)
    for death in range(LOSSES_BEFORE_LONE):
        assert take_all(desk, f"w{death}") == [0]
        desk.lose(f"w{death}")
    desk.put(1, {"alone": False})
    assert desk.claim("v").number == 1
    assert desk.claim("v") is None, "the lost one is not laid beside another"
    assert desk.claim("w").number == 0
    desk.put(2, {"alone": False})
    assert desk.claim("w") is None, "and nothing beside it"
    desk.finished("w", 0)
    assert desk.claim("w").number == 2


def test_a_request_that_keeps_killing_workers_is_given_up_and_its_neighbours_are_not():
    desk = desk_with(False, False, False)
    deaths = 0
    given_up = []
    finished = set()
    while not given_up:
        deaths += 1
        worker = f"w{deaths}"
        held = set(take_all(desk, worker))
        if 0 in held:
            _, given_up = desk.lose(worker)
        else:
            for number in held:
                desk.finished(worker, number)
            finished |= held
        assert deaths < 10
    while desk.num_waiting():
        for number in take_all(desk, "last"):
            desk.finished("last", number)
            finished.add(number)
    assert given_up == [0]
    assert finished == {1, 2}


STEPS = ["claim", "finish", "give back", "die"]


@given(
    alone=st.lists(st.booleans(), max_size=8),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(STEPS)), max_size=60),
)
def test_no_request_is_lost_or_held_twice_whatever_dies(alone, steps):
    desk = desk_with(*alone)
    incarnation = dict.fromkeys(range(4), 0)
    holds = {f"{place}.0": [] for place in range(4)}
    done, given_up, losses = set(), set(), dict.fromkeys(range(len(alone)), 0)
    for place, step in steps:
        name = f"{place}.{incarnation[place]}"
        if step == "claim":
            entry = desk.claim(name)
            if entry is not None:
                assert all(entry.number not in held for held in holds.values())
                assert entry.number not in done | given_up
                holds[name].append(entry.number)
                assert len(holds[name]) == 1 or all(losses[one] < LOSSES_BEFORE_LONE for one in holds[name])
        elif step == "finish" and holds[name]:
            number = holds[name].pop(0)
            desk.finished(name, number)
            done.add(number)
        elif step == "give back" and holds[name]:
            desk.give_back(name, holds[name].pop())
        elif step == "die":
            for number in holds.pop(name):
                losses[number] += 1
            given_up |= set(desk.lose(name)[1])
            incarnation[place] += 1
            holds[f"{place}.{incarnation[place]}"] = []
    assert given_up == {number for number, count in losses.items() if count >= MOST_LOSSES}
    held = {number for numbers in holds.values() for number in numbers}
    while desk.num_waiting():
        for number in take_all(desk, "end"):
            desk.finished("end", number)
            done.add(number)
    assert done | held | given_up == set(range(len(alone)))
