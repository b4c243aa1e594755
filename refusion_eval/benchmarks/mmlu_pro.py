"""MMLU-Pro: questions of fourteen fields with up to ten choices."""

from refusion_eval.benchmarks import LETTERS, Benchmark
from refusion_eval.benchmarks.extract import release
from refusion_eval.benchmarks.extract.letters import first_letter_stated
from refusion_eval.benchmarks.multiple_choice import answer_letter, choice_prompts
from refusion_eval.benchmarks.rows import ID, TEXT, TEXTS, Row, Source


def _release_system(row: Row) -> str:
    return (
        f"The following are multiple choice questions (with answers) about {row['category']}. Think step by step and "
        'then finish your answer with "the answer is (X)" where X is the correct letter choice.\n'
    )


def _release_prompt(row: Row) -> str:
    options = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS[:10], row["options"], strict=False))
    return f"Question:\n{row['question']}\nOptions:\n{options}Answer: Let's think step by step."


BENCHMARK = Benchmark(
    name="mmlu_pro",
    title="MMLU-Pro",
    order=1,
    kind="choice",
    source=Source(
        hub="TIGER-Lab/MMLU-Pro",
        split="test",
        num_rows=12032,
        sorted_by="category",
        columns={"question_id": ID, "question": TEXT, "options": TEXTS, "answer": TEXT, "category": TEXT},
        labelled=("answer", lambda row: LETTERS[: len(row["options"])]),
    ),
    gold=answer_letter,  # where `answer_index` disagrees with it (question 3983), the letter is the right one
    ours=choice_prompts(lambda row: row["options"], answer_letter),
    release=release.prompts(
        system=_release_system,
        user=_release_prompt,
        stop_strings=("Question:",),
        gold_text=lambda row: f"The answer is ({answer_letter(row)}).",
        filters={"first": lambda text, row: first_letter_stated(text, len(row["options"]))},
    ),
    id_column="question_id",
    stock_tasks=("mmlu_pro*",),
)
