"""Arguments of the scripts that cannot be used are refused in one line, and existing files are kept."""

import pytest
import sandbox
import scaleout
import soak
import train

REFUSED = {
    "no such model of a soak": (soak, ("--model", "MISSING"), ("MISSING",)),
    "an empty model of a soak": (soak, ("--model", "FOLDER"), ("FOLDER", "config.json")),
    "no such device of a soak": (soak, ("--device", "tpu"), ("tpu",)),
    "no such type of a soak": (soak, ("--dtype", "int3"), ("int3", "bfloat16")),
    "no such device of a training benchmark": (train, ("--device", "tpu"), ("tpu", "cpu or cuda")),
    "no such shape of a training benchmark": (train, ("--shape", "9T"), ("9T", "small")),
    "a soak's output in a file": (soak, ("--out", "FILE/x", "--requests", "1"), ("FILE", "cannot be written")),
    "a training benchmark's output in a file": (train, ("--out", "FILE/x"), ("FILE", "cannot be written")),
    "a scale-out benchmark's output in a file": (scaleout, ("--out", "FILE/x"), ("FILE", "cannot be written")),
    "no rows of a sandbox benchmark": (sandbox, ("--data", "MISSING"), ("MISSING",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_used_is_one_error(name, script, tmp_path):
    module, arguments, words = REFUSED[name]
    names = {"FILE": tmp_path / "file", "FOLDER": tmp_path / "folder", "MISSING": tmp_path / "missing"}
    names["FILE"].write_text("previous content")
    names["FOLDER"].mkdir()

    def filled(text):
        for word, path in names.items():
            text = text.replace(word, str(path))
        return text

    status, _, errors = script(module.main, *map(filled, arguments))
    assert status == 1
    assert [line for line in errors.splitlines() if line.startswith("error: ")] == [errors.splitlines()[-1]]
    assert all(filled(word) in errors for word in words)
    assert names["FILE"].read_text() == "previous content"
