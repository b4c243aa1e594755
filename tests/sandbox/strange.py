"""Sources that no text file can hold: bytes that are no text, megabytes, depth, and encodings that lie."""

from typing import Any

_ANSWER = "def solve(n):\n    return 6765\n"
_WRONG = "def solve(n):\n    return 0\n"
_PASSED: dict[str, Any] = {"statuses": frozenset({"passed"})}
_DEPTH = 100_000
_MEGABYTE = 1 << 20

# name -> (source, options of the case)
STRANGE: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("", {}),
    "blank": (" \n", {}),
    "null_byte": ("def solve(n):\n    return '\x00'", {}),
    "null_byte_first": ("\x00" + _ANSWER, {}),
    "null_byte_in_a_comment": ("# \x00\n" + _ANSWER, {}),
    "null_bytes_only": ("\x00" * 1000, {}),
    "lone_surrogate": ("# \ud800\n" + _ANSWER, {}),
    "lone_surrogate_in_a_name": ("def \udfff(n):\n    return 1\n", {}),
    "returned_surrogates": ("def solve(n):\n    return '\\ud800' * 10", {}),
    "byte_order_mark": ("\ufeff" + _ANSWER, {}),
    "byte_order_mark_inside": (_WRONG + "\ufeff" + _ANSWER, {}),
    "swapped_byte_order_mark": ("\ufffe" + _ANSWER, {}),
    "utf_16_read_as_latin_1": (_ANSWER.encode("utf-16").decode("latin-1"), {}),
    "not_even_syntax": ("def solve(n:\n    return 6765", {}),
    "every_control_character": ("".join(map(chr, range(32))) + _ANSWER, {}),
    "right_to_left_override": ("def solve(n):\n    return 0 \u202e # 5676 nruter\u2066\n", {}),
    "look_alike_name": ("def s\u043elve(n):\n    return 6765\n", {}),
    "nested_parentheses": ("x = " + "(" * _DEPTH + ")" * _DEPTH, {}),
    "nested_brackets": ("x = " + "[" * _DEPTH, {}),
    "nested_minus": ("x = " + "-" * _DEPTH + "1", {}),
    "nested_not": ("x = " + "not " * _DEPTH + "1", {}),
    "nested_attributes": ("x = x" + ".x" * _DEPTH, {}),
    "nested_calls": ("x = f" + "()" * _DEPTH, {}),
    "nested_lambdas": ("x = " + "lambda: " * _DEPTH + "1", {}),
    "nested_powers": ("x = " + "2**" * _DEPTH + "2", {}),
    "nested_blocks": ("".join(" " * i + "if 1:\n" for i in range(200)) + " " * 200 + "pass", {}),
    "nested_f_strings": ("x = " + "f'{" * 200 + "1" + "}'" * 200, {}),
    "long_sum": ("x = 1" + "+1" * _DEPTH, {}),
    "long_integer": ("x = " + "9" * _MEGABYTE, {}),
    "long_name": (f"{'a' * _MEGABYTE} = 1", {}),
    "unfinished_string": ("x = '''" + "a" * _MEGABYTE, {}),
    "backslashes": ("\\\n" * _DEPTH, {}),
    "beyond_the_limit": ("#" * (33 * _MEGABYTE), {}),
    "null_character_in_a_name_of_a_file": ("def solve(n):\n    open('/tmp/\\0')\n    return 6765", {}),
    # Honest, however they look.
    "carriage_returns": ("def solve(n):\r\n    return 6765\r\n", _PASSED),
    "old_mac_lines": ("def solve(n):\r    return 6765\r", _PASSED),
    "form_feeds": ("\f" + _WRONG + "\f\n\f" + _ANSWER, _PASSED),
    "tabs": ("def solve(n):\n\tif n:\n\t\treturn 6765", _PASSED),
    "utf_16_cookie": ("# -*- coding: utf-16 -*-\n" + _ANSWER, _PASSED),
    "cookie_of_no_encoding": ("# -*- coding: no-such-encoding -*-\n" + _ANSWER, _PASSED),
    "rot13_cookie": ("# -*- coding: rot13 -*-\n" + _ANSWER, _PASSED),
    "no_last_line_end": (_ANSWER.rstrip(), _PASSED),
    "five_megabytes_of_comments": (("#" * 99 + "\n") * (5 * _MEGABYTE // 100) + _ANSWER, _PASSED),
    "a_megabyte_of_text": (f"text = '{'a' * _MEGABYTE}'\n" + _ANSWER, _PASSED),
    "twenty_thousand_statements": ("x = 1\n" * 20_000 + _ANSWER, _PASSED),
    "all_planes_of_unicode": (f"text = '\U0001f600\u4e2d{chr(0x10FFFF)}'\n" + _ANSWER, _PASSED),
    "full_width_digits_and_letters": ("def \uff53\uff4f\uff4c\uff56\uff45(n):\n    return 6765\n", _PASSED),
}
