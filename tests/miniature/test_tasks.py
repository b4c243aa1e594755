"""The mini tasks and drills: right by construction, long enough, each result stated once (`miniature`)."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
from transformers import PreTrainedTokenizerFast

from miniature.data import drill_pairs, items
from miniature.family import EMBEDDED, EQUAL_START, TRAINED_GRADES, Family
from miniature.item import Item
from miniature.knowledge import KINDS, RELATIONS
from miniature.steps import HARDEST_GRADE
from miniature.train import write_tokenizer
from refusion_eval.benchmarks import BENCHMARKS, LETTERS
from refusion_eval.scoring.judge import judge_texts

TASKS = tuple(EMBEDDED.draws)
HARDEST = replace(EMBEDDED, test_grades=(HARDEST_GRADE,))
TERM = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
KIND_OF = {member: kind.name for kind in KINDS for member in kind.members}
FACTS = {
    relation.statement.format(entity=name): fact for relation in RELATIONS for name, fact in relation.facts.items()
}


# Streams of items and what was drawn from them, by task and grades, for all tests: a hard item takes long to draw.
STREAMS: dict[tuple[str, Sequence[int] | None], tuple[Iterator[Item], list[Item]]] = {}


def drawn(task: str, count: int, family: Family | None = None) -> list[Item]:
    """Training items, or test items of a family."""
    key = task, family and family.test_grades
    if key not in STREAMS:
        STREAMS[key] = items(task, test=family is not None, seed=7, family=family or EMBEDDED), []
    stream, known = STREAMS[key]
    known += islice(stream, max(0, count - len(known)))
    return known[:count]


def user(task: str, item: Item) -> str:
    return BENCHMARKS[task].prompts.user(item.prompt_row)


def calculated(left: str, operation: str, right: str) -> float:
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operation]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    write_tokenizer(replace(EMBEDDED, num_tokenizer_items=600), folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("task", TASKS)
def test_gold_responses_are_judged_right(task: str) -> None:
    benchmark = BENCHMARKS[task]
    answers = [(dict(item.prompt_row), item.response) for item in (*drawn(task, 200), *drawn(task, 60, HARDEST))]
    for name in benchmark.prompts.filters if benchmark.second_filter else [None]:
        verdicts = judge_texts(benchmark, answers, filter_name=name)
        assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_all_parts_must_be_right_and_blanks_do_not_count() -> None:
    for item in drawn("parts", 40):
        first, *others = item.response.split("\n")
        texts = [
            "\n\n".join([f" {first} ", *others]) + "\n",
            "\n".join([*others, first]),
            "\n".join(others),
            item.response + "\nThe end.",
        ]
        verdicts = judge_texts(BENCHMARKS["parts"], [(dict(item.row), text) for text in texts])
        assert [verdict.passed for verdict in verdicts] == [True, False, False, False]


def composition(item: Item) -> str:
    """A program without its names and numbers."""
    names = dict.fromkeys(re.findall(r"def (\w+)\((\w+)\)", item.response))
    text = item.response
    for number, (name, parameter) in enumerate(names):
        text = re.sub(rf"\b{name}\b", f"f{number}", text)
        text = text if parameter == "n" else re.sub(rf"\b{parameter}\b", "p", text)
    return re.sub(r"\bn\b", "p", re.sub(r"\b[2-9]\b", "0", text))


def test_held_out_programs_are_new_compositions_of_known_parts() -> None:
    seen, tested = (
        {composition(item) for task in ("humaneval", "mbpp") for item in drawn(task, count, family)}
        for count, family in ((2000, None), (300, TRAINED_GRADES))
    )
    assert len(seen) + len(tested) > 180
    assert len(tested) >= 15
    assert seen.isdisjoint(tested)
    parts = [{part for program in programs for part in program.split("\n\n")} for programs in (seen, tested)]
    assert parts[1] <= parts[0]


def test_programs_do_what_their_prompts_ask() -> None:
    """The words of the prompt stand beside the code in one table, which the judge cannot compare."""
    asked = {
        "give the larger of": "return max(", "give": "return {g}({f}(", "add": "{f}(x) + {g}(x)",
        "subtract": "return {f}(x) - {g}(x)", "list": "return [{g}(n) for", "sum": "return sum({g}(n) for",
        "sort": "return sorted({g}(n) for", "count": "return sum({f}({g}(n)) for",
        "all": "return all({f}({g}(n)) for", "any": "return any({f}({g}(n)) for",
        "go through items and list": "result.append({g}(n))", "go through items and add up": "total += {g}(n)",
        "go through items and give last": "last = {g}(n)", "go through items and give first": "return {g}(n)\nreturn 0",
        "go through items and multiply by": "total *= {g}(n)",
    }  # fmt: skip
    found = set()
    for item in drawn("mbpp", 600):
        text = item.row["text"].removeprefix("Write a function to ").split(", where ")[0]
        words = re.sub(r"\(.*?\)+|\b(?:first|second)\b(?=\()", " ", text).split()
        if words[0] == "check":
            key = "all" if "all" in words else "any"
        elif text.startswith("go through items and give"):
            key = f"go through items and give {'last' if 'of the last' in text else 'first'}"
        else:
            key = max((name for name in asked if text.startswith(name)), key=len)
        found.add(key)
        program = re.sub(r"\n +", "\n", item.response)
        assert asked[key].format(f="first", g="second") in program, (text, item.response)
    assert found == set(asked)


@pytest.mark.parametrize(
    ("task", "is_beyond", "share"),
    [
        ("mmlu_pro", lambda item: item.prompt_row["question"].count("...") == 8, 1),
        ("arc_challenge", lambda item: item.response.count(", found in") == 8, 1),
        ("gsm8k", lambda item: has_number_over_240(item), 0.3),
        ("math", lambda item: has_number_over_240(item), 0.1),
        ("gpqa", lambda item: item.response.count(", so ") == 4, 0.3),
        ("humaneval", lambda item: re.search(r"\b(\w+)\(\1\(n\)\)", item.response) is not None, 0.5),
        ("mbpp", lambda item: "second(second(n))" in item.response, 0.5),
        ("parts", lambda item: has_number_over_240(item) or item.response.count("(") == 8, 0.3),
    ],
)
def test_the_hardest_grade_goes_beyond_what_is_trained_on(
    task: str, is_beyond: Callable[[Item], bool], share: float
) -> None:
    assert not any(is_beyond(item) for item in drawn(task, 1000))
    assert sum(is_beyond(item) for item in drawn(task, 100, HARDEST)) >= 100 * share


def has_number_over_240(item: Item) -> bool:
    return max(map(int, re.findall(r"\d+", item.response)), default=0) > 240


def test_a_constant_passes_the_tests_of_no_program() -> None:
    for item in drawn("mbpp", 400):
        assert len({test.split(" == ")[1] for test in item.row["test_list"]}) > 1


@pytest.mark.parametrize("task", TASKS)
def test_responses_have_37_to_90_tokens(task: str, tokenizer: PreTrainedTokenizerFast) -> None:
    items = [*drawn(task, 1000), *drawn(task, 200, HARDEST)]
    lengths = [len(tokenizer(item.response)["input_ids"]) for item in items]
    assert min(lengths) >= 37
    assert max(lengths) <= 90 < EMBEDDED.gen_length


def test_a_digit_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("35+112=147") == ["3", "5", "+", "1", "1", "2", "=", "1", "4", "7"]


@pytest.mark.parametrize(("task", "question"), [("gsm8k", "question"), ("math", "problem")])
def test_the_result_follows_from_the_last_sentence_and_stands_nowhere_else(task: str, question: str) -> None:
    num_steps: Counter[int] = Counter()
    for item in drawn(task, 600):
        working, result = re.split(r"The answer is (?:\$\\boxed\{)?(?=\d)", item.response)
        number = re.match(r"\d+", result)[0]
        assert number not in re.findall(r"\d+", working)
        assert number not in re.findall(r"\d+", item.row[question])
        *terms, last = re.findall(r"(\d+)([-+*/])(\d+)", working)
        assert calculated(*last) == int(number)
        num_steps[len(terms) + 1] += 1
    assert set(num_steps) == {3, 4, 5}
    assert min(num_steps.values()) > 600 / 3 * 0.7


@pytest.mark.parametrize(("family", "largest"), [(None, 240), (HARDEST, 300)], ids=["training", "hardest"])
@pytest.mark.parametrize("task", ["gsm8k", "math", "gpqa", "parts"])
def test_calculations_are_right_and_their_results_have_at_most_three_digits(
    task: str, family: Family | None, largest: int
) -> None:
    for item in drawn(task, 200 if family else 600, family):
        for left, operation, right, value in TERM.findall(item.response):
            assert calculated(left, operation, right) == int(value)
            assert 0 < int(value) <= largest
            if operation == "*":
                assert min(int(left), int(right)) <= 9
                assert max(int(left), int(right)) <= 99


def assert_most(options: Sequence[str], values: Sequence[str], answer: str, response: str) -> None:
    """Each value stands in one option, the answer has most of them, and the response names the options in order."""
    places = [
        [LETTERS[place] for place, option in enumerate(options) if value in option.split(", ")] for value in values
    ]
    assert all(len(found) == 1 for found in places)
    counts = Counter(letter for found in places for letter in found).most_common()
    assert counts[0][0] == answer
    assert counts[0][1] > counts[1][1]
    assert re.findall(r"\((\w)\)", response) == [*(found[0] for found in places), answer]


def test_one_option_completes_most_of_the_sentences() -> None:
    for item in (*drawn("mmlu_pro", 300), *drawn("mmlu_pro", 60, HARDEST)):
        row = item.prompt_row
        stems = row["question"].removeprefix("Which option completes most of these sentences? ").removesuffix(" ...")
        assert_most(row["options"], [FACTS[stem] for stem in stems.split(" ... ")], row["answer"], item.response)


def test_one_option_has_most_of_the_kinds_asked_for() -> None:
    for item in (*drawn("arc_challenge", 300), *drawn("arc_challenge", 60, HARDEST)):
        row = item.prompt_row
        options = row["choices"]["text"]
        asked = re.split(r", | and ", re.search(r"most of these: (.*)\?", row["question"])[1])
        of_kind = [[one for option in options for one in option.split(", ") if KIND_OF[one] == kind] for kind in asked]
        assert all(len(things) == 1 for things in of_kind)
        assert_most(options, [things[0] for things in of_kind], row["answerKey"], item.response)


def test_options_are_distinct() -> None:
    for item in (*drawn("gpqa", 300), *drawn("gpqa", 60, HARDEST)):
        assert len(set(item.prompt_row["choices"])) == 4
    texts = [item.row["question"] for item in drawn("parts", 400)]
    texts += [query for query, _ in drill_pairs("recall", seed=0, count=300)]
    listed = [options for text in texts if (options := re.findall(r"^[A-H]\. (.+)$", text, re.MULTILINE))]
    assert len(listed) > 300
    assert all(len(set(options)) == len(options) for options in listed)


@pytest.mark.parametrize("drill", EMBEDDED.drills)
def test_the_same_seed_gives_the_same_pairs(drill: str) -> None:
    assert drill_pairs(drill, seed=3, count=50) == drill_pairs(drill, seed=3, count=50)
    assert drill_pairs(drill, seed=3, count=50) != drill_pairs(drill, seed=4, count=50)


@pytest.mark.parametrize("drill", EMBEDDED.drills)
def test_drills_are_right(drill: str) -> None:
    for query, response in drill_pairs(drill, seed=0, count=300):
        options = {
            letter: option.split(", ") for letter, option in re.findall(r"^([A-H])\. (.+)$", query, re.MULTILINE)
        }
        letters = {option[0]: letter for letter, option in options.items()}
        response = re.sub(r"(?<=\d)\. The answer is (\d+)", r"=\1", response)
        sentences: Sequence[str] = response.removesuffix(".").split(". ")
        for sentence in sentences:
            if term := TERM.fullmatch(sentence):
                assert calculated(*term.groups()[:3]) == int(term[4])
            elif drill == "letters":
                assert sentence == f"{sentence.split(' (')[0]} ({letters[sentence.split(' (')[0]]})"
            else:
                assert all(letters[name] == letter for name, letter in named(sentence, letters))
                stem = next((stem for stem in FACTS if sentence.startswith(stem + " ")), None)
                thing = re.search(r" is ([^ ]+), found", sentence)
                assert (
                    sentence.startswith(f"{stem} {FACTS[stem]} (")
                    if stem
                    else sentence.lower().startswith(KIND_OF[thing[1]])
                )
        assert len(sentences) >= 4


def named(sentence: str, letters: dict[str, str]) -> list[tuple[str, str]]:
    """The option and the letter that a sentence names."""
    return [
        (option, letter)
        for option in letters
        for letter in re.findall(rf"\b{re.escape(option)}(?:, found in)? \((\w)\)", sentence)
    ]


@pytest.mark.parametrize("task", ["humaneval", "mbpp"])
def test_programs_with_calculations_need_their_results(task: str) -> None:
    found = list(islice(items(task, test=True, seed=7, family=EQUAL_START), 60))
    answers = [(dict(item.prompt_row), item.response) for item in found]
    assert all(verdict.passed for verdict in judge_texts(BENCHMARKS[task], answers))
    asked = [re.findall(r"\d+[-+*/]\d+", user(task, item).split(", where ")[1]) for item in found]
    assert all(asked)
    is_new = [not any(term in item.response for term in terms) for terms, item in zip(asked, found, strict=True)]
    assert all(is_new)
    slips = [(row, re.sub(r"(?<=[+*-] )\d+", lambda number: str(int(number[0]) + 1), text)) for row, text in answers]
    changed = [slip for slip, answer in zip(slips, answers, strict=True) if slip != answer]
    assert len(changed) > 30
    verdicts = judge_texts(BENCHMARKS[task], changed)
    assert sum(verdict.passed for verdict in verdicts) <= len(changed) / 20
