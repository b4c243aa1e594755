from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.scaleout.work_queue import LOSSES_BEFORE_ISOLATION, MAX_LOSSES, WorkQueue


def queue_with(*alone):
    """A queue with a request for each flag."""
    queue = WorkQueue()
    for number, flag in enumerate(alone):
        queue.put(number, {"alone": flag})
    return queue


def take_all(queue, worker):
    numbers = []
    while (request := queue.claim(worker)) is not None:
        numbers.append(request.number)
    return numbers


def test_requests_are_handed_out_in_order_and_once():
    queue = queue_with(False, False, False)
    assert queue.claim("v").number == 0
    assert take_all(queue, "w") == [1, 2]
    assert queue.claim("v") is None
    assert (queue.num_assigned("v"), queue.num_assigned("w"), queue.num_waiting()) == (1, 2, 0)


def test_timed_requests_come_first_and_each_is_the_only_request_of_its_worker():
    queue = queue_with(False, True, True)
    assert queue.claim("v").number == 1
    assert queue.claim("v") is None
    assert queue.claim("w").number == 2
    queue.complete("v", 1)
    assert queue.claim("v").number == 0


def test_a_worker_with_a_batch_gets_nothing_while_a_timed_request_waits():
    queue = queue_with(False, False)
    assert queue.claim("v").number == 0
    queue.put(2, {"alone": True})
    assert queue.claim("v") is None
    queue.complete("v", 0)
    assert queue.claim("v").number == 2


def test_what_waits_can_be_forgotten_and_what_workers_have_is_not():
    queue = queue_with(False, True, False)
    assert queue.claim("v").number == 1
    assert sorted(queue.clear()) == [0, 2]
    assert queue.num_waiting() == 0
    assert queue.requeue_lost("v") == (1, [])
    assert take_all(queue, "w") == [1]


def test_requests_of_a_dead_worker_go_to_another():
    queue = queue_with(False, False)
    assert take_all(queue, "dead") == [0, 1]
    queue.complete("dead", 0)
    assert queue.requeue_lost("dead") == (1, [])
    assert take_all(queue, "other") == [1]


def test_a_worker_whose_every_record_arrived_loses_nothing():
    queue = queue_with(False)
    take_all(queue, "w")
    queue.complete("w", 0)
    assert queue.requeue_lost("w") == (0, [])
    assert queue.num_waiting() == 0


def test_a_request_that_was_lost_often_has_its_worker_for_itself():
    queue = queue_with(False)
    for death in range(LOSSES_BEFORE_ISOLATION):
        assert take_all(queue, f"w{death}") == [0]
        queue.requeue_lost(f"w{death}")
    queue.put(1, {"alone": False})
    assert queue.claim("v").number == 1
    assert queue.claim("v") is None, "the lost one is not laid beside another"
    assert queue.claim("w").number == 0
    queue.put(2, {"alone": False})
    assert queue.claim("w") is None, "and nothing beside it"
    queue.complete("w", 0)
    assert queue.claim("w").number == 2


def test_a_request_that_keeps_killing_workers_is_given_up_and_its_neighbours_are_not():
    queue = queue_with(False, False, False)
    deaths = 0
    given_up = []
    finished = set()
    while not given_up:
        deaths += 1
        worker = f"w{deaths}"
        held = set(take_all(queue, worker))
        if 0 in held:
            _, given_up = queue.requeue_lost(worker)
        else:
            for number in held:
                queue.complete(worker, number)
            finished |= held
        assert deaths < 10
    while queue.num_waiting():
        for number in take_all(queue, "last"):
            queue.complete("last", number)
            finished.add(number)
    assert given_up == [0]
    assert finished == {1, 2}


STEPS = ["claim", "finish", "die"]


@given(
    alone=st.lists(st.booleans(), max_size=8),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(STEPS)), max_size=60),
)
def test_no_request_is_lost_or_held_twice_whatever_dies(alone, steps):
    queue = queue_with(*alone)
    incarnation = dict.fromkeys(range(4), 0)
    holds = {f"{slot}.0": [] for slot in range(4)}
    done, given_up, losses = set(), set(), dict.fromkeys(range(len(alone)), 0)
    for slot, step in steps:
        name = f"{slot}.{incarnation[slot]}"
        if step == "claim":
            request = queue.claim(name)
            if request is not None:
                assert all(request.number not in held for held in holds.values())
                assert request.number not in done | given_up
                holds[name].append(request.number)
                is_solo = [alone[number] or losses[number] >= LOSSES_BEFORE_ISOLATION for number in holds[name]]
                assert len(holds[name]) == 1 or not any(is_solo)
        elif step == "finish" and holds[name]:
            number = holds[name].pop(0)
            queue.complete(name, number)
            done.add(number)
        elif step == "die":
            for number in holds.pop(name):
                losses[number] += 1
            given_up |= set(queue.requeue_lost(name)[1])
            incarnation[slot] += 1
            holds[f"{slot}.{incarnation[slot]}"] = []
    assert given_up == {number for number, count in losses.items() if count >= MAX_LOSSES}
    held = {number for numbers in holds.values() for number in numbers}
    while queue.num_waiting():
        for number in take_all(queue, "end"):
            queue.complete("end", number)
            done.add(number)
    assert done | held | given_up == set(range(len(alone)))
