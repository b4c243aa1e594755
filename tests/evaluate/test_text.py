import pytest

from refusion_eval.evaluate.text import Detokenizer

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
