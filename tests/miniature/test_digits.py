"""Errors of the next-token head at the digits of results (`miniature.digits`)."""

import re
from dataclasses import replace

from miniature.digits import wrong_digits
from miniature.family import EMBEDDED
from miniature.measure import draws
from refusion_eval import api


def test_every_digit_of_a_result_is_counted_and_a_false_one_is_an_error() -> None:
    model = api.load_model("embedded:autoregressive_sft")
    for task in ("gsm8k", "math"):
        chosen = draws(EMBEDDED, task, 3)
        results = [found for item in chosen for found in re.findall(r"=(\d+)|is (?:\$\\boxed\{)?(\d+)", item.response)]
        wrong, total = wrong_digits(model, task, chosen)
        assert total == sum(len(first or last) for first, last in results)
        assert wrong <= 1
        first = chosen[0].response
        digit = re.search(r"=(\d)", first)
        assert digit is not None
        other = str((int(digit[1]) + 5) % 10)
        false = replace(chosen[0], response=f"{first[: digit.start(1)]}{other}{first[digit.end(1) :]}")
        assert wrong_digits(model, task, [false])[0] >= 1
