import pytest

from refusion_eval.runs.text import Detokenizer

END = 1000
DETOKENIZER = Detokenizer(decode=lambda tokens: bytes(tokens).decode("utf-8", "replace"), special={END: "<end>"})


def ids(text):
    parts = text.split("<end>")
    tokens = list(parts[0].encode())
    for part in parts[1:]:
        tokens += [END, *part.encode()]
    return tokens


@pytest.mark.parametrize(
    ("written", "until", "text"),
    [
        ("a b\n", (), "a b\n"),
        ("answer 4Q: next", ("Q:",), "answer 4"),
        ("one two one", ("two", "one"), ""),
        ("one\n\ntwo", ("two", "\n\n"), "one"),
        ("4<end>", (), "4"),
        ("4<end>5", (), "45"),
        ("4<end>5", ("<end>",), "4"),
        ("<end>5", ("<end>",), ""),
        ("a<end>bQ:c", ("Q:",), "ab"),
        (" keeps blanks ", ("x",), " keeps blanks "),
        ("", ("x",), ""),
    ],
)
def test_text_is_cut_at_the_first_stop_string_and_nothing_else_is_removed(written, until, text):
    assert DETOKENIZER.text(ids(written), until) == text


def test_without_stop_strings_there_is_no_rule():
    assert DETOKENIZER.stop_rule(()) is None


@pytest.mark.parametrize("step", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", ["Q:", "é\n\n", "<end>"])
def test_rule_fires_when_the_stop_string_is_complete_and_not_before(step, stop):
    tokens = ids("some longer text, then é\n\nQ:<end> and more of it")
    rule = DETOKENIZER.stop_rule((stop,))
    for length in range(step, len(tokens) + step, step):
        seen = tokens[:length]
        fired = rule(seen)
        assert fired == (stop in DETOKENIZER.spelled(seen))
        if fired:
            break
    else:
        pytest.fail("never fired")


def test_a_rule_follows_a_request_that_begins_again():
    tokens = ids("xQ: and a longer text")
    rule = DETOKENIZER.stop_rule(("Q:",))
    rule(ids("nothing to stop at in this longer text"))
    assert rule(tokens)


@pytest.mark.parametrize(
    ("written", "until", "kept"),
    [
        ("4Q: next<end>", ("Q:",), "4Q:"),
        ("4Q: next", ("Q:", "next"), "4Q:"),
        ("next Q:Q:", ("Q:", "next"), "next"),
        ("4<end>", ("<end>",), "4<end>"),
        ("4é\n\nnext", ("é\n",), "4é\n"),
        ("4<end>", ("Q:",), "4<end>"),
        ("4 Q", (), "4 Q"),
        ("", ("x",), ""),
    ],
)
def test_tokens_are_kept_up_to_the_end_of_the_first_complete_stop_string(written, until, kept):
    assert list(DETOKENIZER.kept(ids(written), until)) == ids(kept)


def test_kept_tokens_of_a_long_text_are_found_in_few_looks():
    looks = []
    counting = Detokenizer(lambda tokens: looks.append(1) or DETOKENIZER.decode(tokens), DETOKENIZER.special)
    assert len(counting.kept(ids("word " * 200 + "Q:" + " more" * 200), ("Q:",))) == 1002
    assert len(looks) < 15
