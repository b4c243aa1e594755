from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.scaleout.desk import MOST_LOSSES, Desk


def job(name, alone=False):
    return {"name": name, "alone": alone}


def desk_with(*jobs, more=False):
    desk = Desk()
    desk.put(list(enumerate(jobs)), {}, more)
    return desk


def take_all(desk, worker, batching=True):
    numbers = []
    while (claim := desk.claim(worker, len(numbers), batching)).state == "job":
        numbers.append(claim.number)
    return numbers


def test_requests_are_handed_out_in_order_and_once():
    desk = desk_with(job("a"), job("b"), job("c"))
    assert desk.claim("v", 0, False).number == 0
    assert take_all(desk, "w") == [1, 2]
    assert desk.claim("v", 1, True).state == "none"


def test_a_worker_waits_only_while_more_may_come():
    desk = desk_with(more=True)
    assert desk.claim("w", 0, False).state == "wait"
    desk.put([], {}, more=False)
    assert desk.claim("w", 0, False).state == "none"


def test_what_is_measured_alone_comes_first_and_never_joins_a_batch():
    desk = desk_with(job("shared"), job("measured", alone=True))
    assert desk.claim("v", 0, False).number == 1
    desk = desk_with(job("shared"), job("measured", alone=True))
    assert desk.claim("v", 0, True).number == 0
    assert desk.claim("v", 1, True).state == "none"
    assert desk.claim("v", 0, False).number == 1


def test_facts_come_with_the_request_that_needs_them():
    desk = desk_with(job("a"))
    desk.put([], {"width_cost": 3}, more=False)
    assert desk.claim("w", 0, False).settled == {"width_cost": 3}


def test_requests_of_a_dead_worker_go_to_another_and_none_to_the_dead():
    desk = desk_with(job("a"), job("b"))
    assert take_all(desk, "dead") == [0, 1]
    desk.finished("dead", 0)
    assert desk.lose("dead") == (1, [])
    assert desk.claim("dead", 0, False).state == "none"
    assert take_all(desk, "other") == [1]


def test_a_worker_whose_every_record_arrived_loses_nothing():
    desk = desk_with(job("a"))
    take_all(desk, "w")
    desk.finished("w", 0)
    assert desk.lose("w") == (0, [])
    assert desk.num_waiting() == 0


def test_a_request_that_keeps_killing_workers_is_given_up_and_its_neighbours_are_not():
    desk = desk_with(job("poison"), job("a"), job("b"))
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
        finished |= set(take_all(desk, "last"))
    assert given_up == [0]
    assert finished == {1, 2}


@given(
    alone=st.lists(st.booleans(), max_size=8),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["claim", "finish", "die"])), max_size=60),
)
def test_no_request_is_lost_or_held_twice_whatever_dies(alone, steps):
    desk = desk_with(*(job(str(number), flag) for number, flag in enumerate(alone)))
    incarnation = dict.fromkeys(range(4), 0)
    holds = {f"{place}.0": [] for place in range(4)}
    done, given_up, losses = set(), set(), dict.fromkeys(range(len(alone)), 0)
    for place, step in steps:
        name = f"{place}.{incarnation[place]}"
        if step == "claim":
            claim = desk.claim(name, len(holds[name]), bool(holds[name]))
            if claim.state == "job":
                assert all(claim.number not in held for held in holds.values())
                assert claim.number not in done | given_up
                holds[name].append(claim.number)
        elif step == "finish" and holds[name]:
            number = holds[name].pop(0)
            desk.finished(name, number)
            done.add(number)
        elif step == "die":
            for number in holds.pop(name):
                losses[number] += 1
            given_up |= set(desk.lose(name)[1])
            incarnation[place] += 1
            holds[f"{place}.{incarnation[place]}"] = []
    assert given_up == {number for number, count in losses.items() if count >= MOST_LOSSES}
    held = {number for numbers in holds.values() for number in numbers}
    while desk.num_waiting():
        done |= set(take_all(desk, "end", batching=False))
        done |= {number for number in [desk.claim("end", 0, False).number] if number >= 0}
    assert done | held | given_up == set(range(len(alone)))
