"""States of a text as frames: which words are final, and what stands in a sealed text."""

from refusion_eval.report.states import state_frames

STATES = [[0.1, "the cat sat"], [0.25, "a cat sat on"], [0.5, "a cat lay on it"]]


def runs(states, sign=""):
    return [[(run.state, run.text) for run in frame.runs] for frame in state_frames(states, sign)]


def test_a_word_is_final_from_the_state_on_after_which_it_stays():
    assert runs(STATES) == [
        [("draft", "the"), ("new", " cat"), ("draft", " sat")],
        [("new", "a"), ("fixed", " cat"), ("draft", " sat"), ("new", " on")],
        [("fixed", "a cat"), ("new", " lay"), ("fixed", " on"), ("new", " it")],
    ]


def test_a_word_that_moves_stays_and_one_that_comes_back_does_not():
    assert runs([[0, "b c"], [1, "a b c"]]) == [[("draft", "b"), ("new", " c")], [("new", "a b"), ("fixed", " c")]]
    assert runs([[0, "a"], [1, "x"], [2, "a"]])[0] == [("draft", "a")]


def test_frames_say_when_a_state_came_and_how_much_is_final():
    frames = list(state_frames(STATES))
    assert [frame.detail for frame in frames] == [
        "state 1/3   0.100 s",
        "state 2/3   0.250 s",
        "state 3/3   0.500 s",
    ]
    assert [frame.headline for frame in frames][:2] == ["1 of 3 words are final.", "3 of 4 words are final."]


def test_a_sealed_text_has_its_states_without_letters():
    assert {text for frame in runs(STATES, "#") for _, text in frame if set(text) != {"#"}} == set()
